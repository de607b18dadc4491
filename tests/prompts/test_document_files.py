"""Pages of PDF and TIFF files are rendered as pypdfium2 and Pillow render them, and a fault has its own name."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import random
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from reportlab.lib.pdfencrypt import StandardEncryption

from npu_runner.errors import RequestError
from npu_runner.prompts.media.document_files import Document, document_version, open_document
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.page_options import PageOptions
from tests.full_set import examples
from tests.prompts.image_bytes import tiff_of_kinds
from tests.prompts.pdf_files import (
    A5,
    colour,
    empty,
    form,
    highlight,
    mixed,
    one_page,
    pdf,
    shades,
    text,
    tiff,
)

MIXED = pdf(mixed)


def opened(data: bytes, **options: Any) -> Document:
    return open_document(io.BytesIO(data), **options)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def shown(data: bytes, index: int = 0, **options: Any) -> np.ndarray:
    with opened(data) as document:
        page = PageOptions(**options)
        return pixels(page.part_of(document.render(index, page).image))


def refusal(data: bytes, index: int = 0, password: str | None = None, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught, opened(data, password=password) as document:
        document.render(index, PageOptions(**options))
    return caught.value


def of_pypdfium2(data: bytes, scale: float, **options: Any) -> np.ndarray:
    document = pypdfium2.PdfDocument(data)
    document.init_forms()
    return pixels(document[0].render(scale=scale, **options).to_pil())


@pytest.mark.parametrize("dpi", [18, 96, 150, 192.5])
def test_a_page_is_that_of_pypdfium2(dpi: float) -> None:
    np.testing.assert_array_equal(shown(MIXED, dpi=dpi), of_pypdfium2(MIXED, dpi / 72))


@settings(max_examples=examples(40), deadline=None)
@given(box=st.lists(st.floats(0, 1), min_size=4, max_size=4, unique=True))
def test_a_box_is_the_cut_of_the_whole_page(box: list[float]) -> None:
    x0, x1 = sorted(box[:2])
    y0, y1 = sorted(box[2:])
    whole = shown(MIXED, dpi=100)
    height, width, _ = whole.shape
    cut = whole[math.floor(y0 * height) : math.ceil(y1 * height), math.floor(x0 * width) : math.ceil(x1 * width)]
    np.testing.assert_array_equal(shown(MIXED, dpi=100, box=(x0, y0, x1, y1)), cut)


def sides(width: float, height: float, **options: Any) -> tuple[int, int]:
    """The size of a page of so many points."""
    found = shown(one_page(f"0 0 {width} {height}"), **options)
    return found.shape[1], found.shape[0]


def test_sizes_follow_the_order_of_the_options() -> None:
    assert sides(360, 720) == (750, 1500), "150 dots per inch"
    assert sides(360, 720, dpi=72) == (360, 720)
    assert sides(720, 1440, dpi=300) == (1750, 3500), "longest is 3500"
    assert sides(360, 720, dpi=300, longest=1000) == (500, 1000)
    assert sides(360, 720, dpi=72, shortest=500) == (500, 1000)
    assert sides(360, 720, dpi=72, longest=800, shortest=500) == (400, 800), "never beyond longest"
    assert sides(360, 720, dpi=72, longest=4000) == (360, 720), "longest makes nothing larger"
    assert sides(360, 720, dpi=72, shortest=100) == (360, 720), "shortest makes nothing smaller"
    assert sides(100.5, 200.2, dpi=72) == (101, 201), "rounded up, as pypdfium2 does"
    assert sides(360, 720, dpi=72, rotate=90) == (720, 360)
    assert sides(360, 720, dpi=72, rotate=90, size=(50, 40)) == (50, 40)
    assert sides(360, 720, dpi=72, box=(0.25, 0.5, 0.75, 1), rotate=180) == (180, 360)


def test_the_side_that_an_option_names_has_exactly_its_pixels() -> None:
    """Roundings of float64 add no pixel: W * (S / W) may be larger than S."""
    rng = random.Random(51)
    for _ in range(2000):
        sides_P = rng.choice([(612.0, 792.0), (595.2756, 841.8898), (rng.uniform(10, 3000), rng.uniform(10, 3000))])
        shortest = rng.randint(200, 2000)
        longest = rng.randint(shortest, 4000)
        options = PageOptions(dpi=rng.uniform(18, 600), longest=longest, shortest=shortest)
        shorter, longer = sorted(options.size_of_points(*sides_P, 1 << 60))
        assert longer <= longest
        at_dpi = min(Fraction(options.dpi) / 72, Fraction(longest) / Fraction(max(sides_P)))
        if Fraction(min(sides_P)) * at_dpi < shortest:
            assert shorter == shortest or longer == longest, options
        if Fraction(max(sides_P)) * Fraction(options.dpi) / 72 > longest:
            assert longer == longest, options


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_is_clockwise(degrees: int) -> None:
    np.testing.assert_array_equal(shown(MIXED, dpi=50, rotate=degrees), np.rot90(shown(MIXED, dpi=50), -degrees // 90))


def test_a_size_is_bicubic_and_keeps_no_ratio() -> None:
    expected = Image.fromarray(shown(MIXED, dpi=80)).resize((99, 33), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(shown(MIXED, dpi=80, size=(99, 33)), pixels(expected))


def test_filled_in_fields_and_annotations_are_in_the_image() -> None:
    without_forms = of_pypdfium2(pdf(form), 1, may_draw_forms=False)
    assert (shown(pdf(form), dpi=72) < 128).sum() > (without_forms < 128).sum() + 200, "the letters of the value"
    assert (of_pypdfium2(pdf(highlight), 1, draw_annots=False) == 255).all()
    assert (shown(pdf(highlight), dpi=72) < 255).any()


def test_a_text_layer_is_seen() -> None:
    with opened(pdf(text("a"), empty, colour(0.5))) as document:
        assert [document.render(index).has_text for index in range(3)] == [True, False, False]
    with opened(tiff(*shades(1))) as document:
        assert document.render(0).has_text is None


def test_a_document_says_what_it_is() -> None:
    with opened(pdf(empty, empty, size=(360, 720))) as document:
        assert (document.kind, document.num_pages, document.is_encrypted) == ("PDF", 2, False)
        assert document.size(1, PageOptions(dpi=200)) == (1000, 2000)
        assert document.size(1, PageOptions(dpi=600, longest=6000)) == (3000, 6000), "no limit holds here"
    with opened(tiff(*shades(3))) as document:
        assert (document.kind, document.num_pages, document.size(2, PageOptions())) == ("TIFF", 3, (66, 48))


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg", "packbits"])
@pytest.mark.parametrize("is_file", [False, True])
def test_pages_of_a_tiff_file_are_those_of_pillow(compression: str | None, is_file: bool, tmp_path: Path) -> None:
    data = tiff(*shades(5, mode="RGB"), compression=compression)
    (tmp_path / "a.tif").write_bytes(data)
    with open_document((tmp_path / "a.tif").open("rb") if is_file else io.BytesIO(data)) as document:
        for index in (3, 0, 4, 1, 2):
            image = Image.open(io.BytesIO(data))
            image.seek(index)
            np.testing.assert_array_equal(pixels(document.render(index).image), pixels(image))
        with pytest.raises(RequestError, match="page 6: the document has 5 pages"):
            document.render(5)


@pytest.mark.parametrize("big", [False, True])
def test_reduced_copies_are_no_pages_of_a_tiff_file(big: bool) -> None:
    red, blue, lime = ([255, 0, 0], [0, 0, 255], [0, 255, 0])
    for kinds, colours in (((0, 0, 0), (red, blue, lime)), ((2, 1, 2), (red, lime)), ((1, 0), (blue,)), ((1,), (red,))):
        with opened(tiff_of_kinds(*kinds, big=big)) as document:
            assert document.num_pages == len(colours)
            found = [pixels(document.render(index).image)[5, 5].tolist() for index in range(len(colours))]
            assert tuple(found) == colours


def test_a_cut_of_a_turned_page_is_upright() -> None:
    """Also where XMP, which Pillow keeps with a cut, says otherwise than the orientation of the file's own tags."""
    for orientation in range(1, 9):
        for xmp in ({}, {700: b"<a xmlns:tiff='b' tiff:Orientation=\"6\"/>"}):
            exif = Image.Exif()
            exif.update({0x0112: orientation, **xmp})
            file = io.BytesIO()
            shades(1, mode="RGB")[0].save(file, "TIFF", exif=exif)
            expected = pixels(ImageOps.exif_transpose(Image.open(file)))
            with opened(file.getvalue()) as document:
                cut = PageOptions(box=(0, 0, 0.5, 0.5)).part_of(document.render(0).image)
            height, width, _ = expected.shape
            np.testing.assert_array_equal(pixels(open_image(cut)), expected[: height // 2, : width // 2])


def test_options_apply_to_the_page_of_a_tiff_file() -> None:
    (image,) = shades(1, (200, 100), "RGB")
    expected = image.resize((100, 50), Image.Resampling.BICUBIC).crop((10, 5, 60, 50)).transpose(
        Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(
        shown(tiff(image), longest=100, box=(0.1, 0.1, 0.6, 1), rotate=90), pixels(expected))


def test_faults_have_names() -> None:
    whole = pdf(text("a"), text("b"))
    assert refusal(whole, 2).code == refusal(whole, -1).code == "pdf_page_missing"
    assert "2 pages" in refusal(whole, 2).message
    assert refusal(b"%PDF-1.7 and nothing").code == "pdf_broken"
    assert refusal(one_page("0 0 9 9").replace(b"/Kids[3 0 R]", b"/Kids[9 0 R]")).code == "pdf_page_broken"
    assert refusal(b"neither").code == "image_not_recognised"
    locked = pdf(text("a"), password="secret")
    assert refusal(locked).code == refusal(locked, password="wrong").code == "pdf_password"
    assert "wrong" not in refusal(locked, password="wrong").message
    with opened(locked, password="secret") as document:
        assert document.is_encrypted
        assert document.render(0).has_text


@pytest.mark.parametrize("strength", [40, 128])
def test_a_pdf_that_opens_without_a_password_opens_with_any(strength: int) -> None:
    def locked(user: str) -> bytes:
        return pdf(text("a"), encrypt=StandardEncryption(user, ownerPassword="owner", strength=strength))

    owned = locked("")
    expected = of_pypdfium2(owned, 1)
    for data in (owned, pdf(text("a"))):
        for password in (None, "", "owner", "wrong"):
            with opened(data, password=password) as document:
                assert document.is_encrypted is (data == owned)
                np.testing.assert_array_equal(pixels(document.render(0, PageOptions(dpi=72)).image), expected)
    for password in ("user", "owner"):
        with opened(locked("user"), password=password) as document:
            np.testing.assert_array_equal(pixels(document.render(0, PageOptions(dpi=72)).image), expected)
    for password in (None, "", "wrong"):
        assert refusal(locked("user"), password=password).code == "pdf_password"


def test_the_fault_of_a_pdf_is_not_that_of_the_one_before() -> None:
    """PDFium keeps one error for the whole process."""
    without_pages = io.BytesIO()
    pypdfium2.PdfDocument.new().save(without_pages)
    files = {"locked": pdf(text("a"), password="secret"), "broken": b"%PDF-1.7 and nothing",
             "empty": without_pages.getvalue(), "whole": pdf(text("a"))}
    found: dict[str, set[str]] = {name: set() for name in files}
    for names in itertools.permutations(files):
        for name in names:
            try:
                opened(files[name], password="wrong").close()
                found[name].add("opens")
            except RequestError as error:
                found[name].add(f"{error.code}: {error.message}")
    assert found["empty"] == {"pdf_broken: the PDF has no pages"}
    assert [len(each) for each in found.values()] == [1] * 4
    assert found["whole"] == {"opens"}
    assert [found[name].pop().partition(":")[0] for name in ("locked", "broken")] == ["pdf_password", "pdf_broken"]


@pytest.mark.parametrize("box", ["0 0 0 0", "0 0 14400 1", "0 0 1000000000 1000000000", "5 5 5 900", "a b c d",
                                 f"0 0 1{'0' * 60} 5", "0 0 0.0001 0.0001", "0 0 -300 -300"])
def test_no_page_is_too_large(box: str) -> None:
    """`longest` bounds it before it is rendered."""
    with opened(one_page(box, b"0 0 m 9 9 l S")) as document:
        assert max(document.render(0, PageOptions(dpi=600)).image.size) <= 3500


def test_more_pixels_than_allowed_are_refused_before_rendering() -> None:
    huge = one_page("0 0 14400 14400")
    assert refusal(huge, longest=65_000, dpi=600).code == "image_too_large"
    assert refusal(MIXED, size=(60_000, 60_000)).code == "image_too_large"
    assert refusal(tiff(*shades(1)), shortest=60_000).code == "image_too_large"
    with opened(MIXED) as document, pytest.raises(RequestError, match="max_source_pixels"):
        document.render(0, PageOptions(box=(0, 0, 0.1, 0.1)), 1000)


class Disk(io.BytesIO):
    """A file on a disk: it counts the bytes that are read, and fails as soon as it is told to."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self.num_read, self.is_broken = 0, False

    def read(self, num_bytes: int | None = -1) -> bytes:
        if self.is_broken:
            raise OSError(5, "Input/output error")
        data = super().read(num_bytes)
        self.num_read += len(data)
        return data


def test_a_fault_of_the_disk_is_no_broken_document() -> None:
    for data in (pdf(*[mixed] * 3), tiff(*shades(3))):
        disk = Disk(data)
        with open_document(disk) as document:
            document.render(0)
            disk.is_broken = True
            with pytest.raises(RequestError, match="Input/output error") as caught:
                document.render(2)
        assert caught.value.code == "media_unreadable"
        disk = Disk(data)
        disk.is_broken = True
        with pytest.raises(RequestError) as caught:
            open_document(disk)
        assert caught.value.code == "media_unreadable"
        assert disk.closed


def test_only_a_page_is_read() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    pages = [lambda canvas, n=n: canvas.drawInlineImage(Image.fromarray(noise + n), 0, 0) for n in range(40)]
    disk = Disk(data := pdf(*pages))
    with open_document(disk) as document:
        assert disk.num_read < len(data) / 40
        document.render(30)
    assert disk.num_read < len(data) / 5


def test_the_version_is_a_digest_of_both_ends(tmp_path: Path) -> None:
    for num_bytes in (0, 10, 4096, 10_000):
        data = bytes(n % 251 for n in range(num_bytes))
        expected = hashlib.blake2b(num_bytes.to_bytes(8, "little") + data[:4096] + data[-4096:], digest_size=16)
        assert document_version(io.BytesIO(data)) == expected.hexdigest()
    with opened(MIXED) as document:
        assert document.version == document_version(io.BytesIO(MIXED))
    with opened(data := tiff(*shades(3))) as document:
        document.render(2)
        assert document.version == document_version(io.BytesIO(data)), "with the file's own first bytes"


def test_threads_take_turns() -> None:
    expected = shown(MIXED)
    found: list[bool] = []

    def work() -> None:
        for _ in range(5):
            found.append(np.array_equal(shown(MIXED), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


def test_a_page_of_another_shape_than_the_paper() -> None:
    """The crop box and /Rotate count: a page is upright."""
    turned = one_page("0 0 300 600").replace(b"/MediaBox", b"/Rotate 90/CropBox[0 0 100 200]/MediaBox")
    found = shown(turned, dpi=72)
    assert found.shape[:2] == (100, 200)
    assert A5 == (420.0, 595.0)
