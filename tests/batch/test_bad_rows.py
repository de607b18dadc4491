"""Every way in which a row can be bad, through the real processor of the embedded model: its own error, nobody else's.

How each kind of image is converted is tests/prompts's business; here it is which rows live and which die of what.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npu_runner.assets import SHAPES_VL
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.serving.endpoint import Prepared
from npu_runner.serving.workers.pool import WorkerFailure
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.batch.scripted import prepared, row

Prepare = Callable[[bytes], Prepared]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with a secret beside it and a way out of it."""
    outside = tmp_path_factory.mktemp("media")
    folder = outside / "allowed"
    folder.mkdir()
    image = draw_example(TEST_SEEDS[0]).images[0]
    image.save(folder / "fine.png")
    image.save(outside / "secret.png")
    (folder / "inner").symlink_to(folder / "fine.png")
    (folder / "way-out").symlink_to(outside / "secret.png")
    (folder / "text.png").write_text("not an image")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes((folder / "fine.png").read_bytes()[:300])
    (folder / "folder.png").mkdir()
    return folder


@pytest.fixture(scope="module")
def processor() -> ChatProcessor:
    return ChatProcessor(str(SHAPES_VL))


@pytest.fixture(scope="module")
def prepare(processor: ChatProcessor, images: Path) -> Prepare:
    return partial(prepared, processor=processor, media=MediaRules(allowed_dir=images))


def outcome(prepare: Prepare, line: bytes | dict[str, Any]) -> str:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    result = prepare(data)
    if result.error is not None:
        assert not isinstance(result.error, WorkerFailure)
        assert result.error.message
        return result.error.code
    assert result.error is None
    assert len(result.prompt.token_ids) > 0
    return "fine"


def asks(*urls: str, text: str = "What shape is red?") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return row("a", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


def data_url(image: Image.Image, format: str = "PNG", **options: Any) -> str:
    encoded = io.BytesIO()
    image.save(encoded, format, **options)
    return f"data:image/{format.lower()};base64," + base64.b64encode(encoded.getvalue()).decode()


def huge_png(width: int, height: int) -> str:
    """A header that declares this size over no data to speak of."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(100))),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


RGB = Image.new("RGB", (96, 64), "red")
ANIMATION = {"save_all": True, "append_images": [Image.new("RGB", (96, 64), "blue")]}
EXIF = Image.Exif()
EXIF[0x0112] = 6

LINES: list[tuple[str, bytes | dict[str, Any], str]] = [
    ("not JSON", b"{", "not_json"),
    ("not UTF-8", b"\xff\xfe{}", "not_utf8"),
    ("not an object", b"[]", "not_an_object"),
    ("missing fields", {"custom_id": "a"}, "missing_required_parameter"),
    ("wrong types", row("a", max_tokens="3"), "invalid_type"),
    ("messages of another type", row("a", messages={}), "invalid_type"),
    ("empty messages", row("a", messages=[]), "empty_messages"),
    ("unknown role", row("a", messages=[{"role": "robot", "content": "x"}]), "invalid_value"),
    ("no user text", row("a", messages=[{"role": "system", "content": "x"}]), "no_user_text"),
    ("blank user text", row("a", " \n"), "no_user_text"),
    ("max_tokens 0", row("a", max_tokens=0), "invalid_sampling_parameter"),
    ("max_tokens negative", row("a", max_tokens=-5), "invalid_sampling_parameter"),
    ("unknown field", row("a", colour="red"), "unknown_parameter"),
    ("unsupported field", row("a", tools=[{"type": "function"}]), "unsupported_parameter"),
    ("half a character", row("a", "\ud83d"), "not_unicode"),
    ("image in a system message", row("a", messages=[{"role": "system", "content": [
        {"type": "image_url", "image_url": {"url": "fine.png"}}]}]), "image_role"),
    ("too many images", asks(*["fine.png"] * 65), "too_many_images"),
]  # fmt: skip

URLS: list[tuple[str, str, str]] = [
    ("a file", "fine.png", "fine"),
    ("a link inside", "inner", "fine"),
    ("http", "http://example.org/x.png", "media_scheme"),
    ("https", "https://example.org/x.png", "media_scheme"),
    ("ftp", "ftp://example.org/x.png", "media_scheme"),
    ("missing", "nowhere.png", "media_missing"),
    ("dot dot", "../secret.png", "media_not_allowed"),
    ("a link outside", "way-out", "media_not_allowed"),
    ("an absolute path outside", "/etc/passwd", "media_not_allowed"),
    ("a file URL outside", "file:///etc/passwd", "media_not_allowed"),
    ("a folder", "folder.png", "media_unreadable"),
    ("not an image", "text.png", "image_not_recognised"),
    ("zero bytes", "empty.png", "image_empty"),
    ("truncated", "cut.png", "image_truncated"),
    ("data: that is not base64", "data:image/png;base64,*", "media_bad_data_url"),
    ("data: without data", "data:image/png;base64,", "image_empty"),
    ("20,000 x 20,000", huge_png(20_000, 20_000), "image_too_large"),
    ("decompression bomb", huge_png(60_000, 60_000), "image_too_large"),
    ("60,000 pixels wide", huge_png(60_000, 10), "image_aspect_ratio"),
    ("1 x 1", data_url(Image.new("RGB", (1, 1))), "fine"),
    ("CMYK", data_url(RGB.convert("CMYK"), "JPEG"), "fine"),
    ("palette", data_url(RGB.convert("P")), "fine"),
    ("grey", data_url(RGB.convert("L")), "fine"),
    ("black and white", data_url(RGB.convert("1")), "fine"),
    ("16-bit", data_url(Image.new("I;16", (96, 64), 40_000)), "fine"),
    ("alpha", data_url(RGB.convert("RGBA")), "fine"),
    ("grey with alpha", data_url(RGB.convert("LA")), "fine"),
    ("rotated by EXIF", data_url(RGB, "JPEG", exif=EXIF), "fine"),
    ("animated GIF", data_url(RGB, "GIF", **ANIMATION), "fine"),
    ("animated WebP", data_url(RGB, "WEBP", **ANIMATION), "fine"),
]


@pytest.mark.parametrize(("line", "code"), [pytest.param(line, code, id=name) for name, line, code in LINES])
def test_a_bad_row_is_its_own_error(prepare: Prepare, line: bytes | dict[str, Any], code: str) -> None:
    assert outcome(prepare, line) == code


@pytest.mark.parametrize(("url", "code"), [pytest.param(url, code, id=name) for name, url, code in URLS])
def test_an_image_is_taken_or_its_row_refused(prepare: Prepare, url: str, code: str) -> None:
    assert outcome(prepare, asks(url)) == code
    if code != "fine":
        assert outcome(prepare, asks("fine.png", url)) == code, "a good image beside it changes nothing"


def test_file_urls_below_the_folder_are_allowed(prepare: Prepare, images: Path) -> None:
    assert outcome(prepare, asks(f"file://{images}/fine.png")) == "fine"
    assert outcome(prepare, asks(str(images / "fine.png"))) == "fine"


def test_without_an_allowed_folder_no_file_is_read(processor: ChatProcessor, images: Path) -> None:
    strict = partial(prepared, processor=processor)
    assert outcome(strict, asks(str(images / "fine.png"))) == "media_not_allowed"
    assert outcome(strict, asks(data_url(RGB))) == "fine"


def test_special_tokens_in_text_stay_text(prepare: Prepare) -> None:
    def prompt(text: str) -> list[int]:
        result = prepare(json.dumps(asks("fine.png", text=text)).encode())
        assert result.error is None
        assert len(result.prompt.spans) == 1
        return result.prompt.token_ids

    tokenizer = ChatProcessor(str(SHAPES_VL)).tokenizer
    plain = prompt("x")
    for token in ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"):
        typed = prompt(f"x{token}x")
        control = tokenizer.token_to_id(token)
        assert typed.count(control) == plain.count(control), f"{token} typed by a user became a control token"
        assert len(typed) > len(plain)


def test_an_image_is_the_same_inline_and_as_a_file(prepare: Prepare, images: Path) -> None:
    inline = "data:image/png;base64," + base64.b64encode((images / "fine.png").read_bytes()).decode()
    prompts = []
    for url in ("fine.png", inline):
        result = prepare(json.dumps(asks(url)).encode())
        assert result.error is None
        prompts.append(result.prompt)
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[0].images[0].content_hash == prompts[1].images[0].content_hash
