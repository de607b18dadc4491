"""Videos are decoded as transformers decodes them, upright, only where needed; whatever is wrong with one is named."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_formats import READS_AVIF
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.video_settings import VideoSettings
from npu_runner.prompts.media.videos import VideoFile, _wanted_groups
from npu_runner.request.limits import Limits
from tests.full_set import only_full
from tests.videos import declaring_seconds, moving_frames, sound_only, video_of

MOVING = moving_frames(30)
SETTINGS = VideoSettings(frame=ImageSettings(patch_size=16))
# Every fifth frame is a key frame; those shown before one lean on the group before it.
OPEN_GROUPS = {"group": 6, "options": {"x264-params": "open-gop=1:bframes=3:keyint=6:scenecut=0"}}
READ: dict[str, Callable[[], bytes]] = {
    "constant rate": lambda: video_of(MOVING),
    "odd number of frames": lambda: video_of(MOVING[:7]),
    "one frame": lambda: video_of(MOVING[:1]),
    "variable rate": lambda: video_of(MOVING[:9], times=[0, 1, 5, 6, 20, 21, 22, 40, 41]),
    "with sound": lambda: video_of(MOVING, has_sound=True),
    "MP4, read in one pass": lambda: video_of(MOVING, faststart=True),
    "MPEG-4 in AVI": lambda: video_of(MOVING, kind="avi", codec="mpeg4"),
    "groups that lean on each other": lambda: video_of(MOVING, **OPEN_GROUPS),
}


def frames_of(data: bytes, indices: list[int] | None = None) -> list[np.ndarray]:
    with VideoFile(data) as file:
        return list(file.frames(list(range(file.num_frames)) if indices is None else indices))


@pytest.mark.parametrize("name", READ)
def test_frames_are_those_of_transformers(name: str) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import read_video_pyav

    data = READ[name]()
    sampler: Any = SimpleNamespace(fps=2, min_frames=4, max_frames=768, num_frames=None)
    theirs, metadata = read_video_pyav(
        io.BytesIO(data), lambda metadata, **kwargs: Qwen3VLVideoProcessor.sample_frames(sampler, metadata, **kwargs)
    )
    with VideoFile(data) as file:
        assert (file.num_frames, file.fps) == (metadata.total_num_frames, metadata.fps)
        indices = SETTINGS.sample(file.num_frames, file.fps).tolist()
        assert indices == metadata.frames_indices.tolist()
        np.testing.assert_array_equal(np.stack(list(file.frames(indices))), theirs)


@pytest.mark.parametrize(("kind", "codec"), [
    ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("mpegts", "libx264"), ("mov", "mjpeg"), ("flv", "libx264"),
])  # fmt: skip
def test_containers_that_do_not_say_how_many_frames_they_have_are_counted(kind: str, codec: str) -> None:
    assert len(frames_of(video_of(MOVING, kind=kind, codec=codec))) == len(MOVING)


@pytest.mark.parametrize("how", [{"group": 5}, {"group": 12}, OPEN_GROUPS])
@pytest.mark.parametrize("indices", [[0, 29], [7], [5, 6, 11, 23], [29], [13, 14]])
def test_groups_of_which_nothing_is_wanted_are_left_out_and_change_nothing(how: Any, indices: list[int]) -> None:
    data = video_of(MOVING, **how)
    whole = frames_of(data)
    for index, frame in zip(indices, frames_of(data, indices), strict=True):
        np.testing.assert_array_equal(frame, whole[index])


def test_only_groups_that_are_needed_are_decoded() -> None:
    closed = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert _wanted_groups(closed, [0, 3, 6], {4}) == [False, True, False]
    leaning = [0, 1, 2, 6, 4, 5, 9, 7, 8]  # 4 and 5 are shown before 6, the first of their group
    assert _wanted_groups(leaning, [0, 3, 6], {8}) == [False, True, True]
    assert _wanted_groups(leaning, [0, 3, 6], {1}) == [True, False, False]


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_a_turned_video_is_shown_upright(degrees: int) -> None:
    (turned,), (stored,) = (frames_of(video_of(MOVING[:1], rotation=angle)) for angle in (degrees, None))
    # PyAV: the angle is how far a frame is turned counterclockwise to be shown.
    np.testing.assert_array_equal(turned, np.rot90(stored, degrees // 90))


def damaged() -> bytes:
    data = bytearray(video_of(MOVING, group=5))
    start = data.index(b"mdat") + 600
    data[start : start + 300] = bytes(300)
    return bytes(data)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
LARGE = "frames of 8192 x 4352"
REFUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "no bytes": ("video_empty", lambda: b""),
    "garbage": ("video_not_recognised", lambda: np.random.default_rng(0).bytes(5000)),
    "text": ("video_not_recognised", lambda: b"hello world" * 99),
    "a playlist": ("video_not_recognised", lambda: PLAYLIST),
    "sound alone": ("video_no_stream", sound_only),
    "MP4 without its end": ("video_truncated", lambda: video_of(MOVING)[:1500]),
    "MP4 without its last frames": ("video_truncated", lambda: video_of(MOVING, faststart=True)[:-300]),
    "Matroska without its second half": ("video_truncated", lambda: (data := video_of(MOVING, kind="matroska"))[
        : len(data) // 2]),
    "damaged in the middle": ("video_broken", damaged),
    "10 hours between two frames": ("video_too_long", lambda: video_of(MOVING[:2], times=[0, 360_000])),
    "10 hours declared": ("video_too_long", lambda: declaring_seconds(video_of(MOVING, kind="matroska"), 36_000)),
    "3 hours declared, 3 seconds there": ("video_truncated", lambda: declaring_seconds(
        video_of(MOVING, kind="matroska"), 3 * 3600)),
    LARGE: ("video_too_large", lambda: video_of([np.zeros((4352, 8192, 3), np.uint8)], kind="mov",
                                                codec="mjpeg")),
    "turned by 45 degrees": ("video_rotation", lambda: video_of(MOVING[:2], rotation=45)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*(name for name in REFUSED if name != LARGE), *only_full(
    "takes a second to make; other videos that cannot be shown stay", LARGE)])
def test_what_cannot_be_shown_is_named(name: str) -> None:
    code, make = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        frames_of(make())
    assert caught.value.code == code, caught.value.message


def damaged_at(seconds: float) -> bytes:
    """A video of which FFmpeg calls the frame at `seconds` corrupt. Not each damage does that: in about half of the
    places the decoder makes an image out of it, and which places these are depends on each bit of the encoding."""
    whole = video_of(MOVING, kind="matroska")
    with av.open(io.BytesIO(whole)) as container:
        (found,) = (packet for packet in container.demux(video=0)
                    if packet.size and float(packet.pts * packet.time_base) == seconds)
    for at in range(found.pos + found.size // 4, found.pos + found.size - 20):
        data = whole[:at] + b"\xff" * 20 + whole[at + 20 :]
        with av.open(io.BytesIO(data)) as container, contextlib.suppress(av.error.InvalidDataError):
            if next((frame.time for frame in container.decode(video=0) if frame.is_corrupt), None) == seconds:
                return data
    raise AssertionError("FFmpeg notices no damage")


def test_a_damaged_frame_that_is_not_shown_counts_since_others_lean_on_it() -> None:
    with pytest.raises(RequestError, match=r"damaged after 0\.6 seconds") as caught:
        frames_of(damaged_at(0.6), [29])
    assert caught.value.code == "video_broken"


def test_a_list_of_videos_reads_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would open them: that is a file that nobody allowed."""
    (tmp_path / "secret.mp4").write_bytes(video_of(MOVING[:2]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as caught:
        frames_of(b"ffconcat version 1.0\nfile secret.mp4\n")
    assert caught.value.code == "video_not_recognised"


@pytest.mark.parametrize(("kind", "codec", "called"), [
    ("mp4", "libx264", "MP4 or MOV"), ("mov", "libx264", "MP4 or MOV"), ("avi", "mpeg4", "AVI"),
    ("matroska", "libx264", "Matroska or WebM"), ("flv", "flv", "FLV"), ("asf", "mpeg4", "ASF"),
])  # fmt: skip
def test_a_video_in_an_images_field_is_told_where_it_belongs(kind: str, codec: str, called: str) -> None:
    with pytest.raises(RequestError) as caught:
        open_image(video_of(MOVING[:2], kind=kind, codec=codec))
    assert caught.value.code == "image_not_recognised"
    assert f"the file is a video ({called}) and not an image; send it as one: video_url" in caught.value.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "JPEG2000", "ICO",
                                  *(["AVIF"] if READS_AVIF else [])])
def test_an_image_in_a_videos_field_is_told_where_it_belongs(kind: str) -> None:
    encoded = io.BytesIO()
    Image.fromarray(MOVING[0]).save(encoded, kind)
    with pytest.raises(RequestError, match=r"is an image \(.*\) and not a video; send it as one: image_url") as caught:
        frames_of(encoded.getvalue())
    assert caught.value.code == "video_not_recognised"


def test_an_animated_gif_is_a_video_too() -> None:
    encoded = io.BytesIO()
    first, *others = (Image.fromarray(frame) for frame in MOVING[:3])
    first.save(encoded, "GIF", save_all=True, append_images=others, duration=100)
    assert len(frames_of(encoded.getvalue())) == 3


def test_too_many_frames_are_refused_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video_of(MOVING)
    monkeypatch.setattr("npu_runner.prompts.media.videos.LIMITS", Limits(max_video_frames=29))
    with pytest.raises(RequestError, match=r"30 frames or more, at most 29 are allowed \(max_video_frames\)"):
        frames_of(data)
    with pytest.raises(RequestError, match="max_video_frames"):
        frames_of(video_of(MOVING, kind="matroska"))  # whose header does not count them


@pytest.mark.skipif(sys.platform != "linux", reason="nothing else limits a process's memory like that")
def test_a_decoder_that_gets_no_memory_is_told_from_damage(tmp_path: Path) -> None:
    """Room for nothing but the smallest things, once the video is there: the decoder calls it invalid."""
    (tmp_path / "a.mp4").write_bytes(video_of([np.zeros((2160, 4096, 3), np.uint8)] * 3,
                                              options={"preset": "ultrafast"}))
    code = (
        "import resource, av, numpy\n"
        "from npu_runner.errors import RequestError\n"
        "from npu_runner.prompts.media.videos import VideoFile\n"
        f"data = open({str(tmp_path / 'a.mp4')!r}, 'rb').read()\n"
        "with VideoFile(data) as file:\n"
        "    present = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (present + (12 << 20), -1))\n"
        "    try: next(file.frames([0]))\n"
        "    except RequestError as error: print(error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "video_out_of_memory\n", done.stderr


def test_without_pyav_a_video_is_refused_with_the_remedy_and_nothing_else_needs_it(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video_of(MOVING[:2]))
    code = (
        "import sys; sys.modules['av'] = None\n"
        "import npu_runner.prompts.processor, npu_runner.reports.report\n"
        "from npu_runner.errors import RequestError\n"
        "from npu_runner.prompts.media.videos import VideoFile\n"
        f"try: VideoFile(open({str(tmp_path / 'a.mp4')!r}, 'rb').read())\n"
        "except RequestError as error: print(error.code, error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("video_package_missing")
    assert "pip install 'av>=17.1'" in done.stdout
