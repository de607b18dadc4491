"""Makes videos for tests, with PyAV: of one pace or another, turned, with sound, or declaring what is not there."""

from __future__ import annotations

import base64
import io
import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 10


def moving_frames(num_frames: int, width: int = 96, height: int = 64, seed: int = 0) -> list[np.ndarray]:
    """uint8 (height, width, 3) frames, each other than the one before: blocks of random colours that move on."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8, num_frames + width // 8, 3), dtype=np.uint8)
    return [blocks[:, start : start + width // 8].repeat(8, 0).repeat(8, 1) for start in range(num_frames)]


def video_of(
    frames: Sequence[np.ndarray], *, times: Sequence[int] | None = None, rate: int = RATE, kind: str = "mp4",
    codec: str = "libx264", rotation: int | None = None, has_sound: bool = False, group: int | None = None,
    faststart: bool = False, options: dict[str, str] | None = None,
) -> bytes:  # fmt: skip
    """An encoded video. `times`: when each frame is shown, in 1/rate seconds; None: one after the other. `group`:
    frames from one key frame to the next."""
    with tempfile.NamedTemporaryFile() as file:  # by name: the table of contents is moved to the front at the end
        _write(file.name, frames, times, rate, kind, codec, rotation, has_sound, group, faststart, options or {})
        return Path(file.name).read_bytes()


def _write(
    path: str, frames: Sequence[np.ndarray], times: Sequence[int] | None, rate: int, kind: str, codec: str,
    rotation: int | None, has_sound: bool, group: int | None, faststart: bool, options: dict[str, str],
) -> None:  # fmt: skip
    with av.open(path, "w", format=kind, options={"movflags": "faststart"} if faststart else {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, rate)
        stream.codec_context.options = options
        if group is not None:
            stream.codec_context.gop_size = group
        if rotation is not None:
            stream.set_display_rotation(rotation)
        sound: Any = container.add_stream("aac", rate=8000) if has_sound else None
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number if times is None else times[number], Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound is not None:
            _add_sound(container, sound, len(frames) / rate)


def _add_sound(container: Any, stream: Any, seconds: float) -> None:
    samples = (np.sin(np.arange(int(8000 * seconds)) / 5) * 9000).astype(np.int16)[None]
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
    frame.sample_rate, frame.pts = 8000, 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def sound_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        _add_sound(container, stream, 1.0)
    return buffer.getvalue()


def declaring_seconds(matroska: bytes, seconds: float) -> bytes:
    """A Matroska file whose header says that it is so long."""
    at = matroska.index(b"\x44\x89\x88") + 3  # Duration, 8 bytes
    return matroska[:at] + struct.pack(">d", seconds * 1000) + matroska[at + 8 :]


def as_url(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()
