"""Turns an encoded video into pairs of resized frames, each as an image of six colours. Knows nothing of prompts.

More than two where a checkpoint's patches are deeper. A pair is the unit of the tower, of a prompt's places and of the
vision cache. So a repeated or overlapping video costs only its new pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import image_input
from npu_runner.prompts.media.media import Media
from npu_runner.prompts.media.video_files import VideoFile
from npu_runner.prompts.media.video_settings import VideoSettings
from npu_runner.request.limits import field_error
from npu_runner.request.prompt_inputs import ImageInput

# H, W sides of a resized frame


@dataclass(frozen=True)
class Video:
    """A video of a message that was not read yet: encoded bytes, or their address."""

    source: bytes | Media

    @classmethod
    def from_source(cls, given: Any, where: str) -> Video:
        """Whatever a video may be given as: encoded bytes of any kind, their address, or one of these.

        Raises RequestError naming `where`.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, (bytes, bytearray, memoryview)):
            return cls(bytes(given))
        if isinstance(given, Media):
            return cls(given)
        raise field_error(where, f"the encoded bytes of a video are needed, not {type(given).__name__}; decoded frames "
                          "do not say when they are shown: encode them, or send them as images", "invalid_type")


@dataclass(frozen=True)
class VideoInput:
    """A video as the tower sees it, when each pair is shown and how long, in seconds."""

    pairs: list[ImageInput]
    timestamps: list[float]
    seconds_per_pair: float


def prepare_video(data: bytes, settings: VideoSettings, *, check_tokens: Callable[[int], None]) -> VideoInput:
    """Sample, decode and resize. `check_tokens` is told how many tokens the pairs will have, before they are decoded.

    Raises RequestError, never anything else, for a bad video.
    """
    with VideoFile(data) as file:
        indices = settings.sample(file.num_frames, file.fps).tolist()
        height, width = settings.fit(len(indices), file.height, file.width)
        timestamps = settings.timestamps(indices, file.fps)
        check_tokens(len(timestamps) * settings.frame.num_tokens(height, width))
        frames = (_resized(frame, len(indices), settings) for frame in file.frames(indices))
        seconds_per_pair = settings.seconds_per_pair(len(indices), file.num_frames, file.fps)
        return VideoInput(list(_pairs(frames, settings)), timestamps, seconds_per_pair)


def _resized(pixels_HWC: np.ndarray, num_frames: int, settings: VideoSettings) -> np.ndarray:
    height, width = settings.fit(num_frames, *pixels_HWC.shape[:2])
    # Pillow on uint8, as for images.
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize((width, height), resample=Image.Resampling(settings.frame.resample)))


def _pairs(frames: Iterator[np.ndarray], settings: VideoSettings) -> Iterator[ImageInput]:
    """Frames in groups of as many as a patch is deep; the last one is repeated to fill its group."""
    group: list[np.ndarray] = []
    for frame in frames:
        group.append(frame)
        if len(group) == settings.frame.temporal_patch_size:
            yield _pair(group, settings)
            group = []
    if group:
        yield _pair(group + group[-1:] * (settings.frame.temporal_patch_size - len(group)), settings)


def _pair(frames: list[np.ndarray], settings: VideoSettings) -> ImageInput:
    return image_input(np.concatenate(frames, axis=2), settings.frame)


def no_videos(why: str, where: str) -> RequestError:
    """The error of a video for a model that takes none."""
    return field_error(where, f"this model takes no videos here: {why}; send frames of it as images",
                       "model_has_no_video")
