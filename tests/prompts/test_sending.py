"""Whatever image a caller hands in, a worker process makes the same prompt of it as the caller's own process does."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.tasks import PromptTask, chat_task, text_task, unread_file
from npu_runner.request.limits import LIMITS
from npu_runner.serving.endpoint import Endpoint, failed_prompt, prepare_prompt
from npu_runner.serving.replica import FinishedRow
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool

Workers = WorkerPool[PromptTask]
ORIENTATION = 0x0112
KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


def photo(mode: str = "RGB") -> Image.Image:
    """No two corners alike, so that a turned image is another one."""
    y, x = np.mgrid[0:90, 0:120]
    rgb = Image.fromarray(np.stack([x * 2, y * 2, (x + y) % 256], axis=-1).astype(np.uint8))
    if mode in ("RGBA", "LA"):
        rgb.putalpha(Image.fromarray((x * 2).astype(np.uint8)))
    if mode == "I;16":
        return Image.fromarray((x * 500).astype(np.uint16))
    return rgb.convert(mode)


def written(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def opened(kind: str, **options: Any) -> Image.Image:
    return Image.open(written(photo(), kind, **options))


def turned(*, is_read: bool = False, again: bool = False) -> Image.Image:
    """A JPEG that EXIF turns; `again`: by the caller, to another side."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = opened("JPEG", exif=exif)
    if is_read:
        image.load()
    if again:
        image.getexif()[ORIENTATION] = 3
    return image


def second_frame() -> Image.Image:
    image = Image.open(written(photo(), "GIF", save_all=True, append_images=[photo().rotate(180)]))
    image.seek(1)
    return image


def draft() -> Image.Image:
    image = opened("JPEG")
    image.draft("RGB", (30, 30))
    return image


def transparent_palette() -> Image.Image:
    image = photo().quantize(8)
    image.info["transparency"] = 3
    return image


def closed_file() -> Image.Image:
    image = opened("PNG")
    image.load()
    assert image.fp is None or image.fp.closed
    return image


def on_disk(folder: Path) -> Image.Image:
    photo().save(folder / "photo.png")
    return Image.open(folder / "photo.png")


IMAGES: dict[str, Callable[[], Any]] = {
    **{f"opened {kind}": lambda kind=kind: opened(kind) for kind in KINDS},
    **{f"bytes of {kind}": lambda kind=kind: written(photo(), kind).getvalue() for kind in KINDS},
    **{f"mode {mode}": lambda mode=mode: photo(mode) for mode in ("RGB", "L", "RGBA", "LA", "P", "CMYK", "1", "I;16")},
    "a bytearray": lambda: bytearray(written(photo(), "PNG").getvalue()),
    "turned": turned,
    "turned and read": lambda: turned(is_read=True),
    "turned again": lambda: turned(again=True),
    "second frame": second_frame,
    "draft": draft,
    "transparent palette": transparent_palette,
    "closed file": closed_file,
    "a format that is none of ours": lambda: opened("ICO"),
}


@pytest.fixture(scope="module")
def workers(qwen: ChatProcessor) -> Iterator[Workers]:
    with WorkerPool(partial(prepare_prompt, qwen), PoolLimits(num_workers=1, task_timeout_seconds=120.0)) as pool:
        yield pool


def from_worker(workers: Workers, task: PromptTask) -> Any:
    assert task.is_worth_a_worker
    workers.submit(task.sendable(LIMITS.max_source_pixels))
    while (finished := workers.get(1.0)) is None:
        """The test's own timeout ends this."""
    return finished.result.error or finished.result.prompt


def asks(*images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]


def assert_same(found: Any, expected: Any) -> None:
    assert not isinstance(found, RequestError), found
    assert found.token_ids == expected.token_ids
    assert [image.content_hash for image in found.images] == [image.content_hash for image in expected.images]
    assert np.array_equal(found.positions_3T, expected.positions_3T)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_the_same_in_a_worker(name: str, qwen: ChatProcessor, workers: Workers) -> None:
    task = chat_task(qwen, asks(IMAGES[name]()), MediaRules())
    assert_same(from_worker(workers, task), qwen(asks(IMAGES[name]())))
    raw = text_task({"prompt": "<|image_pad|> x", "images": [IMAGES[name]()]})
    assert_same(from_worker(workers, raw), qwen.from_text("<|image_pad|> x", [IMAGES[name]()]))


def test_files_are_decoded_by_the_worker_and_only_once(qwen: ChatProcessor, workers: Workers,
                                                       tmp_path: Path) -> None:
    image = on_disk(tmp_path)
    task = chat_task(qwen, asks(image, image), MediaRules()).sendable(LIMITS.max_source_pixels)
    (first, _), (second, _) = task.images
    assert first == (tmp_path / "photo.png").read_bytes()
    assert first is second
    assert image.tile, "the caller's image is still unread ..."
    assert image.load() is not None, "... and can be read"
    assert_same(from_worker(workers, chat_task(qwen, asks(image, image), MediaRules())),
                qwen(asks(image, image)))


@pytest.mark.parametrize("name", ["second frame", "draft", "turned again", "mode RGB", "closed file"])
def test_an_image_that_is_not_its_file_travels_as_pixels(name: str) -> None:
    assert unread_file(IMAGES[name]()) is None


def test_addresses_are_read_by_the_worker(qwen: ChatProcessor, workers: Workers, tmp_path: Path) -> None:
    photo().save(tmp_path / "photo.png")
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "photo.png"}},
                                             {"type": "text", "text": "Which?"}]}]
    task = chat_task(qwen, messages, MediaRules(allowed_dir=tmp_path))
    expected = qwen(asks((tmp_path / "photo.png").read_bytes()))
    assert_same(from_worker(workers, task), expected)
    (tmp_path / "photo.png").unlink()
    error = from_worker(workers, task)
    assert (error.code, error.param) == ("media_missing", "messages[0].content[0].image_url")


class Text(str):
    """A class that no worker can import."""

    __slots__ = ()


Text.__qualname__ = Text.__name__ = "TextOfNobody"


def test_text_of_a_class_of_its_own_travels_as_text(qwen: ChatProcessor, workers: Workers) -> None:
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(Text("x"))
    long = "colour " * 1000
    for messages in ([{"role": "user", "content": Text(long)}],
                     [{"role": "user", "content": [{"type": "text", "text": Text(long)}]}]):
        task = chat_task(qwen, messages, MediaRules())
        assert_same(from_worker(workers, task), qwen([{"role": "user", "content": long}]))
    assert_same(from_worker(workers, text_task(Text(long))), qwen.from_text(long))


@pytest.mark.parametrize(("image", "code"), [
    (b"junk", "image_not_recognised"), (b"", "image_empty"), ("a.png", "invalid_type"), (photo("F"), "image_mode"),
])  # fmt: skip
def test_a_bad_image_is_named_by_its_place(image: Any, code: str, workers: Workers) -> None:
    task = text_task({"prompt": "<|image_pad|> x", "images": [image]})
    try:
        found = from_worker(workers, task)
    except RequestError as error:
        found = error
    assert isinstance(found, RequestError)
    assert (found.code, found.param) == (code, "images[0]")
    assert found.message.startswith("images[0]: ")


def test_what_is_recalled_never_reaches_a_worker(qwen: ChatProcessor) -> None:
    """Asked back before the worker is there: what it would have been given is counted, and is nothing in the end."""
    limits = PoolLimits(num_workers=1, task_timeout_seconds=120.0)
    endpoint = Endpoint(partial(prepare_prompt, qwen), lambda prepared, answer: FinishedRow(0, None, b""), limits,
                        failed=failed_prompt)
    try:
        long, short = (text_task("word " * count) for count in (10_000, 1))
        endpoint.submit(replace(short if n == 3 else long, number=n) for n in range(5))
        assert endpoint.pool.pending_bytes == 4 * long.num_chars
        assert set(endpoint.recall(3)) == {4, 3, 2}
        assert endpoint.pool.pending_bytes == 2 * long.num_chars
        assert endpoint.recall(9) == [1, 0]
        assert endpoint.pool.pending_bytes == 0
    finally:
        endpoint.pool.close()
