"""A job over videos: each is answered and shown in the report, each hostile one fails by name and by itself."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npu_runner.cli import main as cli
from tests import full_set
from tests.batch.scripted import read_rows, row, write_rows
from tests.full_set import only_full
from tests.prompts.image_bytes import photo
from tests.videos import as_url, declaring_seconds, moving_frames, sound_only, video_of

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
MOVING = moving_frames(12)
RED, BLUE = (np.full((64, 96, 3), colour, dtype=np.uint8) for colour in ((250, 0, 0), (0, 0, 250)))
GOOD = {
    "a.mp4": lambda: video_of(MOVING), "variable.mp4": lambda: video_of(MOVING[:4], times=[0, 1, 9, 30]),
    "turned.mp4": lambda: video_of(MOVING, rotation=90), "one.mp4": lambda: video_of(MOVING[:1]),
    "sound.mp4": lambda: video_of(MOVING, has_sound=True), "b.webm": lambda: video_of(MOVING, kind="webm",
                                                                                      codec="libvpx-vp9"),
    "red to blue.mp4": lambda: video_of([RED] * 6 + [BLUE] * 6),
}  # fmt: skip
BAD = {
    "cut.mp4": ("video_truncated", lambda: video_of(MOVING)[:900]),
    "long.mkv": ("video_too_long", lambda: declaring_seconds(video_of(MOVING, kind="matroska"), 36_000)),
    "sound alone.mp4": ("video_no_stream", sound_only),
    "garbage.mp4": ("video_not_recognised", lambda: bytes(range(256)) * 9),
    "no bytes.mp4": ("video_empty", lambda: b""),
}
# Frames of 35 million pixels, of which there are several on the way: more than the workers of this job may take.
LARGE = {"large.mov": {"kind": "mov", "codec": "mjpeg"}, "large.mp4": {"options": {"preset": "ultrafast"}}}
NO_MEMORY = {"video_out_of_memory", "preprocessing_out_of_memory", "preprocessing_crashed"}


def asks(name: str, *urls: str, kind: str = "video_url") -> dict[str, Any]:
    parts = [{"type": kind, kind: {"url": url}} for url in urls or (name,)]
    parts.append({"type": "text", "text": "What colour is it?"})
    return row(name, messages=[{"role": "user", "content": parts}], max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job that is done, whose workers had little memory."""
    folder = tmp_path_factory.mktemp("videos")
    for name, make in {**GOOD, **{name: make for name, (_, make) in BAD.items()}}.items():
        (folder / name).write_bytes(make())
    large = {} if full_set.is_fast else LARGE
    for name, how in large.items():
        (folder / name).write_bytes(video_of([np.zeros((4320, 8192, 3), dtype=np.uint8)] * 3, **how))
    photo(64, 64).save(folder / "image.png")
    rows = [asks(name) for name in (*GOOD, *BAD, *large)]
    rows += [asks("inline", as_url(video_of(MOVING))), asks("twice", "a.mp4", "b.webm", "a.mp4"),
             asks("image.png", kind="image_url")]  # fmt: skip
    write_rows(folder / "in.jsonl", rows)
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--report", str(folder / "report.html")]
    limits = ["--allowed-media-dir", str(folder), "--worker-memory-bytes", "320M", "--preprocessing-workers", "1"]
    assert cli.main(["batch", *files, *limits, *SMALL]) == 3, "some rows are there to fail"
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return {item["custom_id"]: item for item in read_rows(folder / "out.jsonl")}


@pytest.mark.parametrize("name", [*GOOD, "inline", "twice", "image.png"])
def test_a_good_video_is_answered(name: str, found: dict[str, Any]) -> None:
    assert found[name]["error"] is None


def test_a_video_is_the_same_from_wherever_it_comes(found: dict[str, Any]) -> None:
    bodies = [found[name]["response"]["body"] for name in ("a.mp4", "inline")]
    assert bodies[0]["usage"] == bodies[1]["usage"]
    assert bodies[0]["choices"] == bodies[1]["choices"]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_fails_by_name(name: str, found: dict[str, Any]) -> None:
    error = found[name]["error"]
    assert (error["code"], error["param"]) == (BAD[name][0], "messages[0].content[0].video_url")


@pytest.mark.parametrize("name", only_full(
    "such videos take seconds to make; a decoder that gets no memory stays (prompts/test_video_files.py)", *LARGE))
def test_a_video_that_needs_more_memory_than_a_worker_has_fails_alone(name: str, found: dict[str, Any]) -> None:
    assert found[name]["error"]["code"] in NO_MEMORY


def test_a_row_for_a_vector_takes_videos_and_says_how_they_are_sampled(folder: Path) -> None:
    content = [{"type": "video_url", "video_url": {"url": "a.mp4"}}]
    wishes = {"all": None, "two": {"num_frames": 2}, "wrong": {"size": 1}}
    rows = [{"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {
        "messages": [{"role": "user", "content": content}], "mm_processor_kwargs": wish}}
        for name, wish in wishes.items()]  # fmt: skip
    write_rows(folder / "vectors.jsonl", rows)
    files = ["-i", str(folder / "vectors.jsonl"), "-o", str(folder / "vectors.out.jsonl")]
    options = ["--allowed-media-dir", str(folder), "--runner", "pooling", "--preprocessing-workers", "1"]
    assert cli.main(["batch", *files, *options, *SMALL]) == 3
    found = {item["custom_id"]: item for item in read_rows(folder / "vectors.out.jsonl")}
    num_tokens = {name: found[name]["response"]["body"]["usage"]["prompt_tokens"] for name in ("all", "two")}
    assert num_tokens["two"] < num_tokens["all"]
    assert found["wrong"]["error"]["param"] == "mm_processor_kwargs.size"


def test_the_report_shows_videos_as_sheets_of_frames(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    sheets = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" [^>]*alt="video 1 of ([^"]+)"', page)
    assert {name for _, name in sheets} == {*GOOD, "inline", "twice"}
    (data,) = (data for data, name in sheets if name == "red to blue.mp4")
    sheet = np.asarray(Image.open(io.BytesIO(b64decode(data)))).astype(int)
    height = sheet.shape[0] // 2
    assert sheet.shape[1] == 3 * 96
    assert sheet[: height - 16, :48, 0].min() > 200, "the first frame"
    assert sheet[height + 16 :, -48:, 2].min() > 200, "the last one"
    assert 'alt="image 1 of image.png"' in page
