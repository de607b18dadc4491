"""AVIF, JPEG 2000, ICO, TGA and HEIC: shown as Pillow's plugins show them, bounded and refused as all others are."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.images import open_image, prepare_image
from tests.full_set import examples
from tests.prompts.image_bytes import encoded, photo
from tests.prompts.image_kinds import BOXED, KINDS, bombs, made

SETTINGS = ImageSettings(min_pixels=64 * 64, max_pixels=512 * 512, patch_size=16)
TOLERANCE = {"AVIF": 3, "HEIF": 2}  # both store YCbCr


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(open_image(data)).astype(int)


def refused(data: bytes, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        prepare_image(data, SETTINGS, **options)
    return caught.value.code


@pytest.mark.parametrize("kind", KINDS)
def test_the_image_is_shown(kind: str) -> None:
    square = photo(32, 32)
    assert np.abs(pixels(made(square, kind)) - np.asarray(square).astype(int)).max() <= TOLERANCE.get(kind, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P"])
def test_other_modes_are_as_pillow_shows_them_with_white_behind(kind: str, mode: str) -> None:
    image = photo(32, 32).convert(mode)
    if mode.endswith("A"):
        image.putalpha(photo(32, 32).getchannel("G"))
    try:
        data = made(image, kind)
    except (OSError, ValueError):
        pytest.skip(f"Pillow writes no {kind} of {mode}")
    rgba = Image.open(io.BytesIO(data)).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    np.testing.assert_array_equal(pixels(data), np.asarray(expected))


@pytest.mark.parametrize("options", [{"compression": "tga_rle"}, {"orientation": 1}, {"orientation": -1}])
def test_targa_comes_in_several_ways(options: dict[str, Any]) -> None:
    np.testing.assert_array_equal(pixels(made(photo(), "TGA", **options)), np.asarray(photo()))


def test_a_bare_codestream_and_sixteen_bits_of_grey_are_jpeg_2000_too() -> None:
    bare = made(photo(), "JPEG2000", no_jp2=True)
    assert bare.startswith(b"\xff\x4f\xff\x51")
    np.testing.assert_array_equal(pixels(bare), np.asarray(photo()))
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    np.testing.assert_allclose(pixels(made(Image.fromarray(ramp), "JPEG2000"))[..., 0], ramp / 257, atol=0.5001)


@pytest.mark.parametrize("format", ["png", "bmp"])
def test_an_icon_is_its_largest_image(format: str) -> None:
    data = made(photo(64, 64), "ICO", sizes=[(16, 16), (64, 64), (32, 32)], bitmap_format=format)
    np.testing.assert_array_equal(pixels(data), np.asarray(photo(64, 64)))


@pytest.mark.parametrize("kind", BOXED)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_upright(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = made(photo(), kind, exif=exif.tobytes())
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    np.testing.assert_array_equal(pixels(data), np.asarray(expected))
    assert expected.size == ((40, 60) if orientation > 4 else (60, 40))
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(photo(), "PNG", exif=exif.tobytes()))))
    assert np.abs(pixels(data) - np.asarray(turned).astype(int)).max() <= TOLERANCE[kind]


@pytest.mark.parametrize("kind", BOXED)
def test_of_several_images_the_first_is_shown(kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "lime")]
    data = made(frames[0], kind, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(data)[5, 5] - [255, 0, 0]).max() <= TOLERANCE[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_a_truncated_file_is_an_error(kind: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8))
    data = made(noise, kind, **({"sizes": [(80, 80)]} if kind == "ICO" else {}))
    code = refused(data[: int(len(data) * share)])
    assert code in ("image_truncated", "image_broken", *(["image_not_recognised"] if kind == "TGA" else []))


@pytest.mark.parametrize("name", bombs(64))
def test_a_bomb_is_refused_by_what_it_declares_before_it_is_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    huge, large, small = (bombs(side)[name] for side in (20_000, 15_000, 3_000))
    for function in ("new", "fill"):  # every decoder's room for pixels
        monkeypatch.setattr(Image.core, function, refuse)
    assert refused(huge) == refused(large) == "image_too_large"
    assert refused(small, max_source_pixels=3_000 * 3_000 - 1) == "image_too_large"


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_pixels_as_are_allowed_are_shown(kind: str) -> None:
    # HEIC codes sides that are multiples of 64, and cuts what is shown out of them.
    data = made(photo(64, 64), kind, **({"sizes": [(64, 64)]} if kind == "ICO" else {}))
    assert refused(data, max_source_pixels=64 * 64 - 1) == "image_too_large"
    assert prepare_image(data, SETTINGS, max_source_pixels=64 * 64).num_tokens > 0


def shown_or_refused(data: bytes) -> bool:
    try:
        prepared = prepare_image(data, SETTINGS, max_source_pixels=1_000_000)
    except RequestError as error:
        return error.code.startswith("image_")
    return prepared.pixels_HWC.dtype == np.uint8


SAMPLES = [made(photo(32, 32), kind) for kind in KINDS] + [
    made(photo(32, 32), "JPEG2000", no_jp2=True), made(photo(32, 32), "TGA", compression="tga_rle"),
    made(photo(32, 32).convert("P"), "TGA"), made(photo(32, 32), "ICO", bitmap_format="bmp"),
]  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_damaged_files_raise_nothing_but_request_errors(data: st.DataObject) -> None:
    sample = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 8))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(sample)))
    assert shown_or_refused(bytes(sample[:cut]))


HEADS = [b"\0\0\1\0", b"\0\0\1\0\1\0", b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51", b"\0\0\0\x18ftypavif",
         b"\0\0\0\x18ftypheic", b"\0\0\0\x18ftypmif1", b"\0\0\2" + bytes(9), b"\0\1\1\0\0\1\0\x18"]  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(head=st.sampled_from(HEADS), tail=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_request_errors(head: bytes, tail: bytes) -> None:
    assert shown_or_refused(head + tail)


def test_without_the_optional_package_heic_is_refused_with_the_remedy(tmp_path: Any) -> None:
    (tmp_path / "a.heic").write_bytes(made(photo(), "HEIF"))
    program = """
import sys
sys.modules["pillow_heif"] = None
from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import open_image
try:
    open_image(open(sys.argv[1], "rb").read())
except RequestError as error:
    print(error.code, error.message)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.heic")], stdout=subprocess.PIPE, check=True)
    assert done.stdout.startswith(b"image_not_recognised")
    assert b"pip install 'pillow-heif>=1.0'" in done.stdout


def test_where_pillow_reads_no_avif_it_is_refused_with_the_remedy() -> None:
    """Before 11.3, and where it was built without; all other formats are read."""
    program = """
import io, sys
sys.modules["PIL.AvifImagePlugin"] = None
from PIL import Image
from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import open_image
png = io.BytesIO()
Image.new("RGB", (8, 8)).save(png, "PNG")
open_image(png.getvalue())
try:
    open_image(bytes.fromhex("00000018") + b"ftypavif" + bytes(90))
except RequestError as error:
    print(error.code, error.message)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("image_not_recognised")
    assert f"AVIF; this Pillow ({PIL.__version__}) does not read it, the wheels of 11.3 and newer do" in done.stdout
    assert "AVIF," not in done.stdout, "of the formats that it names as read"


def test_the_optional_package_is_loaded_for_such_images_alone() -> None:
    program = "import sys, npu_runner.prompts.media.images; assert 'pillow_heif' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
