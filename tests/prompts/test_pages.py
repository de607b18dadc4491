"""Addresses of pages: their fields, the documents that stay open, and the fonts that a host lacks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pypdfium2
import pytest
from PIL import Image, ImageOps

from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media import document_files, pages, pdf_fonts
from npu_runner.prompts.media.media import Addresses, Media, MediaRules
from npu_runner.prompts.media.page_options import pages_in
from npu_runner.prompts.media.pages import OpenDocuments
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS
from npu_runner.request.prompt_inputs import PageFacts
from tests.prompts.image_bytes import encoded, photo
from tests.prompts.pdf_files import CJK, by_hand, cjk, colour, empty, mixed, pdf, shades, stream, text, tiff

WHERE = "messages[0].content[0]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.pdf").write_bytes(pdf(text("one"), mixed, colour(0.97)))
    (tmp_path / "one.PDF").write_bytes(pdf(text("alone")))
    (tmp_path / "a.tif").write_bytes(tiff(*shades(3)))
    (tmp_path / "one.tiff").write_bytes(tiff(*shades(1)))
    (tmp_path / "a.png").write_bytes(encoded(photo(40, 60)))
    return tmp_path


def loaded(folder: Path, address: Any, documents: OpenDocuments | None = None, **rules: Any) -> Any:
    """What stands behind an address: (image or bytes, facts)."""
    given = Addresses(MediaRules(**{"allowed_dir": folder, **rules}))
    media = given.media({"type": "image_url", "image_url": address}, WHERE)
    assert media is not None
    given.check_sizes("messages")
    return (documents or OpenDocuments()).load_image(media, LIMITS.max_source_pixels)


def pixels(folder: Path, address: Any, documents: OpenDocuments | None = None) -> np.ndarray:
    return np.asarray(loaded(folder, address, documents)[0])


def refusal(folder: Path, address: Any, **rules: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        loaded(folder, address, **rules)
    assert caught.value.message.startswith(WHERE)
    return caught.value


def test_an_address_names_its_page(folder: Path) -> None:
    second = pixels(folder, {"url": "a.pdf", "page": 2})
    for address in ("a.pdf#page=2", {"url": "a.pdf#page=2", "page": 2}, f"file://{folder}/a.pdf#page=2",
                    folder / "a.pdf#page=2", "./a.pdf#page=02"):  # fmt: skip
        np.testing.assert_array_equal(pixels(folder, address), second)
    assert not np.array_equal(pixels(folder, "a.pdf#page=1"), second)
    assert pixels(folder, "a.tif#page=3").shape[1] == 66
    (folder / "link.pdf").symlink_to(folder / "a.pdf")
    np.testing.assert_array_equal(pixels(folder, folder / "link.pdf#page=2"), second)


def test_a_file_of_the_literal_name_goes_first(folder: Path) -> None:
    (folder / "a.pdf#page=2").write_bytes(encoded(photo(8, 8)))
    (folder / "b.pdf#page=2").write_bytes(pdf(colour(0)))
    assert loaded(folder, "a.pdf#page=2") == ((folder / "a.pdf#page=2").read_bytes(), None)
    assert loaded(folder, folder / "a.pdf#page=2") == ((folder / "a.pdf#page=2").read_bytes(), None)
    assert (pixels(folder, "b.pdf#page=2") == 0).all()
    assert loaded(folder, f"file://{folder}/{quote('a.pdf#page=2')}")[1] is None
    np.testing.assert_array_equal(pixels(folder, f"file://{folder}/a.pdf#page=2"), pixels(
        folder, {"url": "a.pdf", "page": 2}))


def test_without_a_page_a_file_of_one_page_is_that_page(folder: Path) -> None:
    for name in ("a.pdf", "a.tif"):
        found = refusal(folder, name)
        assert (found.code, "#page=1" in found.message) == ("image_several_pages", True)
    np.testing.assert_array_equal(pixels(folder, "one.PDF"), pixels(folder, "one.PDF#page=1"))
    np.testing.assert_array_equal(pixels(folder, "one.tiff"), np.asarray(shades(1)[0].convert("RGB")))


@pytest.mark.parametrize(("address", "field"), [
    ({"url": "a.pdf#page=2", "page": 1}, "page"), ({"url": "a.pdf", "page": 0}, "page"),
    ({"url": "a.pdf", "page": True}, "page"), ({"url": "a.pdf#page=0"}, "page"), ({"url": "a.pdf", "dpi": 17}, "dpi"),
    ({"url": "a.pdf", "dpi": 601}, "dpi"), ({"url": "a.pdf", "longest": 0}, "longest"),
    ({"url": "a.pdf", "shortest": 1.5}, "shortest"), ({"url": "a.pdf", "box": [0, 0, 1]}, "box"),
    ({"url": "a.pdf", "box": [0.5, 0, 0.5, 1]}, "box"), ({"url": "a.pdf", "box": [0, 0, 1.01, 1]}, "box"),
    ({"url": "a.pdf", "box": [0, float("nan"), 1, 1]}, "box"), ({"url": "a.pdf", "rotate": 45}, "rotate"),
    ({"url": "a.pdf", "size": [10]}, "size"), ({"url": "a.pdf", "size": "10"}, "size"),
    ({"url": "a.pdf", "version": "x"}, "version"), ({"url": "a.png", "page": 1}, ""),
    ({"url": "a.png", "dpi": 150}, ""),
    ({"url": "a.tif", "page": 1, "dpi": 150}, "")])  # fmt: skip
def test_a_value_that_no_field_has_is_refused(address: Any, field: str, folder: Path) -> None:
    found = refusal(folder, address)
    assert found.code == "invalid_value"
    assert found.param == f"{WHERE}.image_url{f'.{field}' if field else ''}"


def test_options_work_on_every_image(folder: Path) -> None:
    image = photo(40, 60)
    expected = image.resize((20, 30), Image.Resampling.BICUBIC).crop((2, 3, 10, 30)).rotate(-90, expand=True)
    found, facts = loaded(folder, {"url": "a.png", "longest": 30, "box": [0.1, 0.1, 0.5, 1], "rotate": 90})
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert facts == PageFacts(is_blank=False, width=27, height=8, has_text=None)
    inline = "data:image/png;base64," + b64encode((folder / "a.png").read_bytes()).decode()
    np.testing.assert_array_equal(pixels(folder, {"url": inline, "size": [7, 9]}), np.asarray(
        image.resize((7, 9), Image.Resampling.BICUBIC)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_with_options_is_turned_once(kind: str, folder: Path, qwen: ChatProcessor) -> None:
    """The oracle is the file that Pillow's exif_transpose made upright beforehand."""

    def shown(address: dict[str, Any]) -> np.ndarray:
        part = {"type": "image_url", "image_url": address}
        (image,) = qwen([{"role": "user", "content": [part]}], media=MediaRules(allowed_dir=folder)).images
        return image.pixels_HWC

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        (folder / "turned").write_bytes(encoded(photo(90, 60), kind, exif=exif))
        with Image.open(folder / "turned") as turned:
            (folder / "upright").write_bytes(encoded(ImageOps.exif_transpose(turned), "PNG", exif=b""))
        for options in ({}, {"longest": 9999}, {"longest": 70}, {"shortest": 80}, {"box": [0, 0.1, 0.4, 1]},
                        {"rotate": 90}, {"size": [100, 40]}):  # fmt: skip
            np.testing.assert_array_equal(shown({"url": "turned", **options}), shown({"url": "upright", **options}))


def test_facts_of_pages(folder: Path) -> None:
    facts = [loaded(folder, {"url": "a.pdf", "page": page, "dpi": 72})[1] for page in (1, 2, 3)]
    assert facts[0] == PageFacts(is_blank=False, width=420, height=595, has_text=True)
    assert (facts[2].is_blank, facts[2].has_text) == (True, False)
    assert not loaded(folder, "a.tif#page=2")[1].is_blank
    for spread, is_blank in ((8, True), (9, False)):
        image = Image.new("RGB", (10, 10), (100, 50, 200))
        image.putpixel((3, 3), (100, 50 + spread, 200))
        (folder / "b.tif").write_bytes(tiff(image))
        assert loaded(folder, "b.tif")[1].is_blank is is_blank


def test_a_pdf_is_no_data_url(folder: Path) -> None:
    inline = "data:application/pdf;base64," + b64encode(pdf(empty)).decode()
    for address in (inline, f"{inline}#page=1", {"url": inline, "page": 1}):
        found = refusal(folder, address)
        assert (found.code, "a PDF in a data: URL" in found.message) == ("image_not_recognised", True)
        assert "write it to a file below the allowed folder, and name that with #page=1" in found.message


def test_pages_of_a_tiff_may_be_in_the_address(folder: Path) -> None:
    inline = "data:image/tiff;base64," + b64encode((folder / "a.tif").read_bytes()).decode()
    for address in (f"{inline}#page=2", f" {inline.replace('data', 'Data')}#page=2", {"url": inline, "page": 2}):
        np.testing.assert_array_equal(pixels(folder, address), pixels(folder, "a.tif#page=2"))
    assert loaded(folder, f"{inline}#page=2")[1] == loaded(folder, "a.tif#page=2")[1]
    assert refusal(folder, f"{inline}#page=9").code == "pdf_page_missing"
    assert refusal(folder, {"url": f"{inline}#page=2", "page": 1}).code == "invalid_value"
    png = "data:image/png;base64," + b64encode((folder / "a.png").read_bytes()).decode()
    assert "page: an image has no pages" in refusal(folder, f"{png}#page=1").message
    assert refusal(folder, f"{png}#part").code == "media_bad_data_url"


def test_documents_do_not_count_as_media(folder: Path) -> None:
    for name in ("a.pdf#page=1", "a.tif#page=2"):
        for limits in ({"max_bytes": 10}, {"max_total_bytes": 20}):
            assert loaded(folder, name, **limits)[1] is not None
    (folder / "named_otherwise").write_bytes((folder / "a.pdf").read_bytes())
    assert loaded(folder, {"url": "named_otherwise", "page": 1}, max_bytes=10)[1] is not None
    (folder / "picture.pdf").write_bytes((folder / "a.png").read_bytes())
    assert refusal(folder, "picture.pdf", max_bytes=10).code == "media_too_large"


def test_a_password_comes_from_a_file(folder: Path) -> None:
    (folder / "locked.pdf").write_bytes(pdf(text("locked"), password="secret"))
    found = refusal(folder, "locked.pdf")
    assert (found.code, "--pdf-passwords" in found.message) == ("pdf_password", True)
    for name in ("locked.pdf", "*"):
        (folder / "passwords").write_text(f'{{"{name}": "secret"}}')
        rules = MediaRules().with_passwords(folder / "passwords")
        assert "secret" not in repr(rules)
        for address in ("locked.pdf", "./locked.pdf", f"file://{folder}/locked.pdf"):
            assert loaded(folder, address, pdf_passwords=rules.pdf_passwords)[1].has_text
    for wrong in ("[]", '{"a": 1}', '{"a": "secret"'):
        (folder / "passwords").write_text(wrong)
        with pytest.raises(ConfigError, match="pdf_passwords") as caught:
            MediaRules().with_passwords(folder / "passwords")
        assert "secret" not in str(caught.value)


def test_a_password_for_all_others_locks_no_document(folder: Path) -> None:
    (folder / "owned.pdf").write_bytes(pdf(text("owned"), password=""))
    for name in ("a.pdf#page=1", "owned.pdf"):
        assert loaded(folder, name, pdf_passwords={"*": "for all others"})[1].has_text


@pytest.mark.parametrize(("source", "kind"), [("a.tif", "TIFF"), ("a.png", "PNG")])
def test_a_file_with_the_suffix_of_a_pdf_is_called_what_it_is(source: str, kind: str, folder: Path) -> None:
    """The row is one that a reader with dpi makes by the file's name."""
    (folder / "named.pdf").write_bytes((folder / source).read_bytes())
    found = refusal(folder, {"url": "named.pdf", "page": 1, "dpi": 150})
    assert (found.code, Image.open(folder / "named.pdf").format) == ("invalid_value", kind)
    for words in (f"the content of this file is {kind}, whatever its name", "give the file the suffix of its content",
                  "leave dpi out of a row made by hand"):  # fmt: skip
        assert words in found.message
    if kind == "PNG":
        assert "leave page out of a row" in refusal(folder, {"url": "named.pdf", "page": 1}).message


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_four_documents_stay_open(folder: Path) -> None:
    for number in range(6):
        (folder / f"{number}.pdf").write_bytes(pdf(*[colour(number / 10)] * 2))
    documents, before = OpenDocuments(), num_descriptors()
    for page in (1, 2):
        for number in (0, 1, 2, 3, 4, 5, 5):
            found = pixels(folder, f"{number}.pdf#page={page}", documents)
            assert abs(found.astype(int) - 255 * number / 10).max() < 1
    assert num_descriptors() == before + 4


def test_a_replaced_document_is_opened_again(folder: Path) -> None:
    documents = OpenDocuments()
    version = {"url": "one.PDF", "version": None}
    (folder / "one.PDF").write_bytes(pdf(colour(0)))
    assert (pixels(folder, "one.PDF", documents) == 0).all()
    with (folder / "one.PDF").open("rb") as file:
        from npu_runner.prompts.media.document_files import document_version

        version["version"] = document_version(file)
    assert (pixels(folder, version, documents) == 0).all()
    (folder / "new").write_bytes(pdf(colour(1)))
    (folder / "new").rename(folder / "one.PDF")
    assert (pixels(folder, "one.PDF", documents) == 255).all()
    assert refusal(folder, version).code == "document_changed"
    assert refusal(folder, {"url": "a.png", "version": "0" * 32}).code == "document_changed"


def test_parts_of_one_page_are_cut_out_of_it(folder: Path) -> None:
    documents = OpenDocuments()
    whole = pixels(folder, {"url": "a.pdf", "page": 2, "dpi": 96})
    height, width, _ = whole.shape
    top, left = height // 2, width // 4  # both sides are multiples of the fractions, or rounded outwards
    for _ in range(2):
        found = pixels(folder, {"url": "a.pdf", "page": 2, "dpi": 96, "box": [left / width, top / height, 1, 1]},
                       documents)
        np.testing.assert_array_equal(found, whole[-found.shape[0] :, -found.shape[1] :])
        assert abs(found.shape[0] - (height - top)) <= 1
    other = pixels(folder, {"url": "a.pdf", "page": 1, "dpi": 96, "box": [0, 0, 1, 0.5]}, documents)
    np.testing.assert_array_equal(other, pixels(folder, {"url": "a.pdf", "page": 1, "dpi": 96})[: other.shape[0]])


def test_the_last_of_20000_pages_costs_what_the_first_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PDFium walks the pages of a flat tree once, with the first far page. The file stays open, and so the walk is the
    only one of its worker."""
    num_pages = 20_000
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents %d 0 R>>" % (3 + num_pages)
    kids = b" ".join(b"%d 0 R" % (3 + number) for number in range(num_pages))
    (folder / "tree.pdf").write_bytes(by_hand(
        b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, num_pages),
        *[page] * num_pages, stream(b"0 0 50 50 re f")))
    counts: Counter[str] = Counter()
    open_document, read = pages.open_document, document_files._File.read

    def counting_open(*arguments: Any, **options: Any) -> Any:
        counts["opened"] += 1
        return open_document(*arguments, **options)

    def counting_read(file: Any, num_bytes: int = -1) -> bytes:
        counts["reads"] += 1
        return read(file, num_bytes)

    monkeypatch.setattr(pages, "open_document", counting_open)
    monkeypatch.setattr(document_files._File, "read", counting_read)
    documents = OpenDocuments()

    def num_reads(number: int) -> int:
        counts["reads"] = 0
        pixels(folder, f"tree.pdf#page={number}", documents)
        return counts["reads"]

    assert num_reads(1) < 1000, "the table of objects"
    assert num_reads(2) < 10
    assert num_reads(num_pages) > 1000, "the walk"
    assert [num_reads(number) for number in (num_pages, num_pages - 1, 3, 10_000)] == [0] * 4
    assert counts["opened"] == 1


class Megabytes(str):
    """An address that must not be read whole to know its suffix."""

    def lower(self) -> str:
        raise AssertionError("all of it was read")


def test_only_the_end_of_an_address_is_read_for_its_suffix() -> None:
    for name, page in (("a.pdf", 1), ("a.pdf#page=3", 3), ("a.png", None)):
        url = Megabytes("x/" * 999 + name)
        part = {"type": "image_url", "image_url": {"url": url}}
        shown = [] if page is None else [(url.partition("#")[0], page)]
        assert list(pages_in({"messages": [{"role": "user", "content": [part]}]})) == shown
    media = Media(url=Megabytes("x/" * 999 + "a.pdf"), where=WHERE, rules=MediaRules())
    assert media.page == (media.url, 1)


def test_pages_of_a_request_are_known_by_name() -> None:
    parts = [{"type": "image_url", "image_url": address} for address in (
        {"url": "a.pdf#page=3"}, {"url": "a.pdf", "page": 4}, {"url": "b.TIF"}, {"url": "c.png"}, "d.pdf#page=2", 5)]
    parts.append({"type": "text", "text": "e.pdf#page=2"})
    assert list(pages_in({"messages": [{"role": "user", "content": parts}]})) == [
        ("a.pdf", 3), ("a.pdf", 4), ("b.TIF", 1), ("d.pdf", 2)]  # fmt: skip


# -- fonts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CJK)
def test_text_that_pdfium_leaves_out_fails_by_name(name: str, tmp_path: Path) -> None:
    """On every host: the page fails if, and only if, nothing of it is rendered."""
    data = pdf(cjk(name))
    (tmp_path / "a.pdf").write_bytes(data)
    is_rendered = bool(np.asarray(pypdfium2.PdfDocument(data)[0].render().to_pil()).min() < 128)
    assert is_rendered is (name not in pdf_fonts.fonts_here().missing)
    if is_rendered:
        assert loaded(tmp_path, "a.pdf")[1].has_text
    else:
        found = refusal(tmp_path, "a.pdf")
        assert found.code == "pdf_font_missing"
        assert found.message.endswith(
            f"'a.pdf': its font {CJK[name][0]!r} is neither embedded nor installed here, so that text like "
            f"{CJK[name][1][0]!r} is not rendered; apt install fonts-noto-cjk, then run again with --retry errors "
            "--accept-changed prompts.decoders")


def test_an_invisible_layer_of_text_needs_no_font(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(cjk("Japan1", is_invisible=True)))
    assert loaded(tmp_path, "a.pdf")[1] == PageFacts(is_blank=True, width=876, height=1240, has_text=True)


def test_without_a_pdf_its_library_is_not_imported(qwen_folder: Path, folder: Path) -> None:
    code = f"""
import sys
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.media.media import MediaRules
processor = ChatProcessor({str(qwen_folder)!r})
processor.identity()
ask = lambda url: processor([{{"role": "user", "content": [{{"type": "image_url", "image_url": {{"url": url}}}}]}}],
                            media=MediaRules(allowed_dir={str(folder)!r}))
ask("a.png")
print("pypdfium2" in sys.modules)
(page,) = ask("a.pdf#page=1").pages
print("pypdfium2" in sys.modules, page.has_text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_a_host_without_pypdfium2_says_so(folder: Path) -> None:
    code = f"""
import sys
sys.modules["pypdfium2"] = None
from npu_runner.errors import RequestError
from npu_runner.prompts.media.document_files import open_document
try:
    open_document(open({str(folder / "a.pdf")!r}, "rb"))
except RequestError as error:
    print(error.code, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("image_not_recognised")
    assert "pip install 'pypdfium2>=5.15'" in done.stdout


def test_bytes_of_a_pdf_are_told_how_pages_are_read(qwen: ChatProcessor) -> None:
    with pytest.raises(RequestError, match="by the file's path and #page=1"):
        qwen([{"role": "user", "content": [{"type": "image", "image": pdf(empty)}]}])
    with pytest.raises(RequestError, match="a file part is not read") as caught:
        qwen([{"role": "user", "content": [{"type": "file", "file": {"file_id": "a"}}]}])
    assert caught.value.code == "unsupported_part"


def test_a_tiff_file_in_memory_of_several_pages_names_the_page() -> None:
    from npu_runner.prompts.media.images import open_image

    with pytest.raises(RequestError, match="#page=1"):
        open_image(io.BytesIO(tiff(*shades(2))).getvalue())
