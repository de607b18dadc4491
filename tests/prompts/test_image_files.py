"""Every odd image does what the README's table says: shown as a person would expect, or a named RequestError."""

from __future__ import annotations

import inspect
import io
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.prompts.media.image_settings import ImageSettings, read_image_settings
from npu_runner.prompts.media.images import open_image, prepare_image
from npu_runner.prompts.processor import ChatProcessor
from tests.full_set import examples
from tests.prompts.image_bytes import encoded, photo, png, tiff_of_kinds

ANY = 1 << 20
"""Tokens: more than any image here has."""
SETTINGS = ImageSettings(min_pixels=64 * 64, max_pixels=512 * 512, patch_size=16, image_mean=(0.5,) * 3,
                         image_std=(0.5,) * 3)
# The last Pillow for Python 3.10 cannot read the uncompressed YCbCr that it writes.
READS_RAW_YCBCR = int(PIL.__version__.partition(".")[0]) >= 13


def pixels(source: bytes | Image.Image) -> np.ndarray:
    return np.asarray(open_image(source))


def refusal(source: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare_image(source, SETTINGS, **options)
    assert caught.value.message
    return caught.value


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF", "JPEG", "MPO"])
def test_common_formats_show_the_image(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind in ("JPEG", "MPO") else {}
    shown = pixels(encoded(photo(), kind, **options)).astype(int)
    tolerance = {"JPEG": 40, "MPO": 40, "GIF": 40}.get(kind, 0)
    assert np.abs(shown - np.asarray(photo()).astype(int)).max() <= tolerance


def test_grey_palette_one_bit_and_cmyk_images_become_rgb() -> None:
    for mode in ("L", "P", "1", "CMYK", *(["YCbCr"] if READS_RAW_YCBCR else [])):
        changed = photo().convert(mode)
        kind = "PNG" if mode in ("L", "P", "1") else "TIFF"
        np.testing.assert_array_equal(pixels(encoded(changed, kind)), np.asarray(changed.convert("RGB")))
    inverted = pixels(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100))  # cyan 0: red
    assert np.abs(inverted.astype(int) - [255, 0, 0]).max() <= 3


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    for kind in ("PNG", "TIFF"):
        shown = pixels(encoded(Image.fromarray(ramp), kind))
        np.testing.assert_allclose(shown[..., 0], ramp / 257, atol=0.5001)
        assert (shown == shown[..., :1]).all()
    pgm = b"P5 64 64 65535\n" + ramp.astype(">u2").tobytes()
    np.testing.assert_allclose(pixels(pgm)[..., 1], ramp / 257, atol=0.5001)


def with_chunks(png_file: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """The PNG file with these in front of its pixels."""
    at = png_file.index(b"IDAT") - 4
    made = b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
                    for kind, body in chunks)
    return png_file[:at] + made + png_file[at:]


def test_the_transparent_grey_is_white_as_with_eight_bits() -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    eight, sixteen = (encoded(Image.fromarray(values)) for values in (grey, grey.astype(np.uint16) * 257))
    shown = [pixels(with_chunks(file, (b"tRNS", struct.pack(">H", value))))
             for file, value in ((eight, 5), (sixteen, 5 * 257))]
    np.testing.assert_array_equal(*shown)
    assert shown[0][0, 5].tolist() == [255, 255, 255]


LONG = b"a" * (2 << 20)
ROTATED = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'><a tiff:Orientation=\"6\"/></x:xmpmeta>"


@pytest.mark.parametrize("chunk", [
    (b"zTXt", b"Comment\0\0" + zlib.compress(LONG)), (b"iTXt", b"prompt\0\1\0\0\0" + zlib.compress(LONG)),
    (b"iCCP", b"profile\0\0" + zlib.compress(LONG)), (b"tEXt", b"prompt\0" + LONG),
    (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LONG)), (b"zTXt", b"broken"),
    (b"zTXt", b"Raw profile type exif\0\0broken"),
], ids=lambda chunk: f"{chunk[0].decode()} {chunk[1][:8]!r}")  # fmt: skip
def test_texts_and_profiles_of_any_size_cost_nothing(chunk: tuple[bytes, bytes]) -> None:
    plain = encoded(photo())
    file = with_chunks(plain, *[chunk] * 40)
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(pixels(file), pixels(plain))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_texts_that_turn_an_image_count() -> None:
    turned = np.rot90(pixels(photo()), -1)
    for chunk in ((b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + ROTATED),
                  (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(ROTATED))):
        file = with_chunks(encoded(photo()), chunk, (b"tEXt", b"prompt\0" + LONG))
        np.testing.assert_array_equal(pixels(file), turned)
        np.testing.assert_array_equal(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB"), turned)


def test_sixteen_bit_colour_keeps_its_brightness() -> None:
    rows = b"".join(b"\0" + struct.pack(">HHH", 65535, 32768, 0) * 8 for _ in range(8))
    assert pixels(png(8, 8, bits=16, data=rows))[0, 0].tolist() == [255, 128, 0]


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_defined_brightness_are_refused(mode: str) -> None:
    value = 0.5 if mode == "F" else 70000
    assert refusal(encoded(Image.new(mode, (40, 40), value), "TIFF")).code == "image_mode"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_lies_on_white(mode: str) -> None:
    alpha = Image.fromarray(np.repeat(np.array([[0, 128, 255]], dtype=np.uint8), 3, axis=0))
    image = Image.new("RGBA", (3, 3), "black")
    image.putalpha(alpha)
    if mode == "PA":
        source = Image.new("RGB", (3, 3), "black").convert("P")
        source.putalpha(alpha)
        assert source.mode == "PA"
    else:
        source = encoded(image.convert(mode))
    np.testing.assert_allclose(pixels(source)[1, :, 0], [255, 127, 0], atol=1)


def test_palette_transparency_lies_on_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((0, 0), 1)
    shown = pixels(encoded(image, transparency=0))
    assert shown[0, 0].tolist() == [0, 0, 255]
    assert shown[1, 1].tolist() == [255, 255, 255]


def test_opaque_alpha_changes_nothing() -> None:
    np.testing.assert_array_equal(pixels(encoded(photo().convert("RGBA"))), np.asarray(photo()))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(9))
def test_exif_rotation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    np.testing.assert_array_equal(pixels(data), np.asarray(expected))
    assert pixels(data).shape[:2] == ((60, 40) if orientation > 4 else (40, 60))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_upright_image_stays_as_it_is(kind: str, orientation: int) -> None:
    """Whether bytes were opened or an image of the caller, and also after a cut, which keeps metadata."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    xmp = ROTATED.replace(b"6", b"%d" % orientation)
    for data in (encoded(photo(), kind, exif=exif), with_xmp(kind, xmp), with_xmp(kind, ROTATED, orientation)):
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        for source in (data, Image.open(io.BytesIO(data))):
            once = open_image(source)
            np.testing.assert_array_equal(pixels(once), expected)
            np.testing.assert_array_equal(np.asarray(once), expected)
        np.testing.assert_array_equal(pixels(open_image(data).crop((0, 0, 30, 20))), expected[:20, :30])


def with_xmp(kind: str, xmp: bytes, orientation: int | None = None) -> bytes:
    """An image with this XMP, and with an orientation in EXIF, which counts before it."""
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    if kind == "TIFF":
        exif[700] = xmp
    if kind == "PNG":
        return with_chunks(encoded(photo(), kind, exif=exif), (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp))
    return encoded(photo(), kind, exif=exif, **({} if kind == "TIFF" else {"xmp": xmp}))


def test_a_broken_exif_block_counts_as_upright() -> None:
    for junk in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03"):
        assert pixels(encoded(photo(), "JPEG", exif=junk)).shape == (40, 60, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert pixels(data)[5, 5].tolist() == [255, 0, 0]


@pytest.mark.parametrize("big", [False, True])
def test_of_several_pages_none_is_left_out_in_silence(big: bool) -> None:
    """A fax of two pages is two images: one would be answered, and the other never missed."""
    for kinds in ((0, 0), (2, 2), (2, 1, 2)):
        found = refusal(tiff_of_kinds(*kinds, big=big))
        assert (found.code, "several pages" in found.message) == ("image_several_pages", True)
    for kinds in ((0,), (0, 1), (0, 1, 4)):  # reduced copies and a mask
        assert Image.open(io.BytesIO(tiff_of_kinds(*kinds, big=big))).n_frames == len(kinds)  # type: ignore[attr-defined]
        assert pixels(tiff_of_kinds(*kinds, big=big))[5, 5].tolist() == [255, 0, 0]


def test_a_circle_of_directories_ends() -> None:
    data = bytearray(tiff_of_kinds(0))
    (first,) = struct.unpack_from("<L", data, 4)
    (count,) = struct.unpack_from("<H", data, first)
    struct.pack_into("<L", data, first + 2 + 12 * count, first)
    assert pixels(bytes(data))[5, 5].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_a_truncated_file_is_an_error(kind: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    assert refusal(data[: int(len(data) * share)]).code in ("image_truncated", "image_broken", "image_not_recognised")
    if kind in ("PNG", "JPEG", "GIF", "BMP") and share >= 0.2:
        assert refusal(data[: int(len(data) * share)]).code == "image_truncated"


def test_a_file_without_bytes_or_image_is_an_error() -> None:
    assert refusal(b"").code == "image_empty"
    assert refusal(Image.new("RGB", (0, 5))).code == "image_empty"
    for data, name in [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"hello world", "unknown"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "unknown"),
        (b"\0" * 999, "unknown"),
    ]:
        error = refusal(data)
        assert error.code == "image_not_recognised"
        assert name in error.message
    for wrong in (None, 7, "text", [1], {"url": "x"}):
        assert refusal(wrong).code == "invalid_type"


def test_a_single_pixel_is_scaled_up() -> None:
    prepared = prepare_image(encoded(Image.new("RGB", (1, 1), (9, 8, 7))), SETTINGS)
    assert prepared.pixels_HWC.shape == (64, 64, 3)
    assert (prepared.pixels_HWC == [9, 8, 7]).all()


def test_a_strip_is_refused_by_its_shape_before_decoding() -> None:
    for data in (encoded(Image.new("RGB", (20000, 20))), png(20000, 20), png(1, 201)):
        assert refusal(data).code == "image_aspect_ratio"
    assert prepare_image(encoded(Image.new("RGB", (200, 1))), SETTINGS).num_tokens > 0


def test_a_bomb_is_refused_by_its_declared_size_before_decoding() -> None:
    for side in (14_000, 30_000, 2**31 - 1):
        assert (refused := refusal(png(side, side))).code == "image_too_large"
        assert str(side * side) in refused.message, "the number of pixels that are declared"
    assert refusal(png(3000, 1000), max_source_pixels=2_999_999).code == "image_too_large"
    assert refusal(Image.new("1", (300, 300)), max_source_pixels=300 * 300 - 1).code == "image_too_large"


def test_a_user_may_allow_more_pixels_than_pillow_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = encoded(Image.new("RGB", (30, 20), "red"))
    assert refusal(data, max_source_pixels=599).code == "image_too_large"
    assert prepare_image(data, SETTINGS, max_source_pixels=600).num_tokens > 0
    assert Image.MAX_IMAGE_PIXELS == 100, "the process's own limit is as it was"


def test_an_image_opened_by_the_caller_can_be_broken_too() -> None:
    data = encoded(photo(), "JPEG")
    assert refusal(Image.open(io.BytesIO(data[:-20]))).code == "image_truncated"
    closed = Image.open(io.BytesIO(data))
    closed.close()
    assert refusal(closed).code == "image_broken"


def test_an_image_opened_by_the_caller_is_left_as_it_was() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(photo().convert("RGBA"), exif=exif)))
    prepare_image(image, SETTINGS)
    assert (image.mode, image.size, image.getexif()[0x0112]) == ("RGBA", (60, 40), 6)


def shown_or_refused(data: bytes) -> bool:
    """Whether bytes become a whole image or a RequestError; anything else goes through to the test."""
    try:
        prepared = prepare_image(data, SETTINGS, max_source_pixels=1_000_000)
    except RequestError as error:
        return error.code.startswith("image_")
    return prepared.pixels_HWC.dtype == np.uint8 and prepared.num_tokens * 32 * 32 * 3 == prepared.pixels_HWC.size


SAMPLES = [
    encoded(photo(), kind, **options)
    for kind, options in [
        ("PNG", {}),
        ("JPEG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("PPM", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("JPEG", {"progressive": True}),
    ]
]


@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_damaged_files_raise_nothing_but_request_errors(data: st.DataObject) -> None:
    sample = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 8))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(sample)))
    assert shown_or_refused(bytes(sample[:cut]))


@settings(max_examples=examples(200), deadline=None)
@given(
    head=st.sampled_from(
        [
            b"",
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff\xe0",
            b"GIF89a",
            b"RIFF\0\0\0\0WEBPVP8 ",
            b"BM",
            b"II*\0",
            b"MM\0*",
            b"P6 ",
            b"P5 9 9 255\n",
            b"P1\n",
        ]
    ),
    tail=st.binary(max_size=200),
)
def test_random_bytes_raise_nothing_but_request_errors(head: bytes, tail: bytes) -> None:
    assert shown_or_refused(head + tail)


def modes() -> st.SearchStrategy[str]:
    """The last transformers for Python 3.10 drops what is transparent, later ones put it on white, as we do."""
    from transformers.image_transforms import convert_to_rgb

    shows_white = "return_numpy" in inspect.signature(convert_to_rgb).parameters
    return st.sampled_from(["RGB", "L", "P", "CMYK", *(["RGBA", "LA"] if shows_white else [])])


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(1, 900), height=st.integers(1, 900), mode=st.deferred(modes))
def test_pixels_equal_transformers_for_any_size_and_mode(
    width: int, height: int, mode: str, qwen: ChatProcessor, hf_qwen: Any
) -> None:
    if max(width, height) > 200 * min(width, height):
        height = width
    image = photo(width, height).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(photo(width, height).getchannel("G"))
    ours = prepare_image(image, qwen.image_settings)
    theirs = hf_qwen.image_processor(images=[image])
    assert list(ours.grid_thw) == theirs["image_grid_thw"][0].tolist()
    s = qwen.image_settings
    assert s is not None
    values = (ours.pixels_HWC * s.rescale_factor - np.array(s.image_mean)) / np.array(s.image_std)
    gh, gw, m, p = ours.grid_thw[1] // 2, ours.grid_thw[2] // 2, s.merge_size, s.patch_size
    patches = theirs["pixel_values"].reshape(gh, gw, m, m, 3, s.temporal_patch_size, p, p)
    for frame in range(s.temporal_patch_size):
        shown = patches[:, :, :, :, :, frame].transpose(0, 2, 5, 1, 3, 6, 4).reshape(gh * m * p, gw * m * p, 3)
        np.testing.assert_allclose(values, shown, atol=1e-6, rtol=0)


@settings(max_examples=examples(300), deadline=None)
@given(
    width=st.integers(1, 20000),
    height=st.integers(1, 20000),
    low=st.integers(1, 1 << 20),
    high=st.integers(1, 1 << 22),
    patch=st.sampled_from([14, 16]),
)
def test_sizes_equal_transformers_and_none_exceeds_the_largest(
    width: int, height: int, low: int, high: int, patch: int
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    sizes = ImageSettings(min_pixels=min(low, high), max_pixels=max(low, high), patch_size=patch)
    try:
        expected = smart_resize(height, width, patch * 2, sizes.min_pixels, sizes.max_pixels)
    except ValueError:
        with pytest.raises(RequestError, match="ratio"):
            sizes.fit(height, width)
        return
    assert sizes.fit(height, width) == expected
    assert sizes.num_tokens(*expected) <= sizes.num_tokens(*sizes.largest_size(ANY))
    room = max(1, sizes.num_tokens(*expected))
    assert sizes.num_tokens(*sizes.largest_size(room)) >= 0.98 * room, "what fits into a prompt is tried, too"


@pytest.mark.parametrize(
    "bounds", [(1, 32 * 32), (64 * 64, 64 * 64), (65536, 65536), (65536, 16777216), (4096, 401408)]
)
def test_the_largest_size_can_be_reached(bounds: tuple[int, int]) -> None:
    sizes = ImageSettings(min_pixels=bounds[0], max_pixels=bounds[1], patch_size=16)
    largest = sizes.num_tokens(*sizes.largest_size(ANY))
    thin = (
        sizes.num_tokens(*sizes.fit(h, w)) for h in range(1, 100) for w in range(h, min(200 * h, 20000) + 1, 1 + h // 3)
    )
    assert max(sizes.num_tokens(*sizes.fit(*sizes.largest_size(ANY))), *thin) >= 0.9 * largest


def test_the_largest_image_has_the_most_tokens_allowed(qwen: ChatProcessor) -> None:
    largest = qwen.largest_image(ANY)
    assert largest.num_tokens == (640 // 32) ** 2
    assert largest.pixels_HWC.shape == (640, 640, 3)
    assert qwen.largest_image(99).pixels_HWC.shape[:2] in ((9 * 32, 11 * 32), (11 * 32, 9 * 32))


@pytest.mark.parametrize("most", [1, 2, 3, 63, 211, 4095, 8191, 16384, 20000])
def test_the_largest_size_within_a_prompt_is_as_long_as_an_image_can_be(most: int) -> None:
    """8,191 is a prime, and no image is a strip of one by 8,191 tokens: those end at 1,810."""
    sizes = ImageSettings(min_pixels=65536, max_pixels=16777216, patch_size=16)
    height, width = sizes.largest_size(most)
    assert 0.99 * min(most, 16384) <= sizes.num_tokens(height, width) <= most
    assert most < 2000 or max(height, width) < 2 * min(height, width)


def test_the_hash_covers_pixels_size_and_settings() -> None:
    from dataclasses import replace

    base = prepare_image(photo(128, 64), SETTINGS)
    darker = Image.fromarray(np.asarray(photo(128, 64)) // 2)
    blank_wide, blank_tall = (prepare_image(Image.new("RGB", size), SETTINGS) for size in ((128, 64), (64, 128)))
    other_mean = prepare_image(photo(128, 64), replace(SETTINGS, image_mean=(0.4, 0.5, 0.5)))
    hashes = [one.content_hash for one in (base, prepare_image(darker, SETTINGS), blank_wide, blank_tall, other_mean)]
    assert len(set(hashes)) == 5
    assert all(len(one) == 16 for one in hashes)
    assert prepare_image(encoded(photo(128, 64)), SETTINGS).content_hash == base.content_hash


def test_settings_follow_transformers_and_the_users_bounds(qwen_folder: Path, tmp_path: Path) -> None:
    from preprocessing_checkpoints import write_json

    vision = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
    ours = read_image_settings(qwen_folder, vision, min_pixels=100, max_pixels=5000)
    assert (ours.min_pixels, ours.max_pixels, ours.image_mean) == (100, 5000, (0.5, 0.4, 0.3))
    with pytest.raises(ConfigError, match="image_min_pixels"):
        read_image_settings(qwen_folder, vision, max_pixels=1000)
    base = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    write_json(
        tmp_path / "preprocessor_config.json", {**base, "min_pixels": 3136, "do_rescale": False, "do_normalize": False}
    )
    plain = read_image_settings(tmp_path, vision)
    assert (plain.min_pixels, plain.max_pixels) == (3136, 28 * 28 * 1280)
    assert (plain.rescale_factor, plain.image_mean, plain.image_std) == (1.0, (0.0,) * 3, (1.0,) * 3)
    write_json(tmp_path / "processor_config.json", {"image_processor": {**base, "min_pixels": 4096}})
    assert read_image_settings(tmp_path, vision).min_pixels == 4096
    (tmp_path / "processor_config.json").unlink()
    for wrong in (
        {"patch_size": 14},
        {"merge_size": 1},
        {"do_resize": False},
        {"do_center_crop": True},
        {"min_pixels": "x"},
        {"image_mean": [1]},
        {"image_std": [0, 1, 1]},
        {"min_pixels": -1},
        {"size": 5},
        {"resample": "x"},
    ):
        write_json(tmp_path / "preprocessor_config.json", {**base, **wrong})
        with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
            read_image_settings(tmp_path, vision)
