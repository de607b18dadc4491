"""A checkpoint's settings for videos: sampled frames, their sizes, their times in the prompt. Knows no pixels.

The rules are those of transformers' video processors: Qwen3-VL's, in whose terms a video is frames x height x width,
and Qwen2-VL's, which bounds each frame. GLM's families see a pace by the clock, where other families spread a count
evenly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from npu_runner.checkpoint.files import read_json
from npu_runner.config import MAX_VIDEO_FPS
from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.media.image_settings import (
    MAX_ASPECT_RATIO,
    ImageSettings,
    check_against_tower,
    grown,
    positive_integer,
    settings_from,
    within_bounds,
)

ASSUMED_FPS = 24.0
"""Frames per second of a video whose file does not say it."""


class VideoForm(Enum):
    """The form of a video in a family's prompt."""

    TIMESTAMPS = "timestamps"
    """Each pair of frames behind its time, which is text; a pair has positions of its own (Qwen3-VL)."""
    STEPS = "steps"
    """One run of tokens; a position in time for each pair (Qwen2-VL)."""
    SECONDS = "seconds"
    """One run of tokens; `tokens_per_second` positions in time for each second (Qwen2.5-VL)."""
    WHOLE_SECONDS_BEHIND = "whole seconds behind"
    """Each pair of frames as an image, and behind it its time in seconds, rounded down (GLM-4.1V)."""
    SECONDS_BEHIND = "seconds behind"
    """The same with tenths and the word for them (GLM-4.6V)."""

    @property
    def is_one_run(self) -> bool:
        """Pairs follow each other without text between them."""
        return self in (VideoForm.STEPS, VideoForm.SECONDS)

    @property
    def is_of_images(self) -> bool:
        """A pair has the tokens of an image, and those around it."""
        return self in (VideoForm.WHOLE_SECONDS_BEHIND, VideoForm.SECONDS_BEHIND)


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """All settings that shape the vision tower's input for a video."""

    unread: ClassVar[frozenset[str]] = frozenset(("min_pixels", "max_pixels"))
    """Fields of files that these rules do not read."""
    bounds_each_frame: ClassVar[bool] = False
    """min_pixels and max_pixels, of settings and of requests, are of each frame as of an image."""
    samples_always: ClassVar[bool] = False
    """Whatever a file's `do_sample_frames` says."""
    frame: ImageSettings
    """Patches and colours of a frame; its min_pixels and max_pixels bound the pixels of all frames together."""
    fps: float = 2.0
    """Frames per second, ..."""
    num_frames: int | None = None
    """... or the number of frames of the whole video."""
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    """A frame has no more than `max_video_tokens`, nor than its share of the video's pixels."""
    max_video_tokens: int = 768

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> VideoSettings:
        """The settings with a request's checked `fps`, `num_frames` or `max_frames`."""
        wanted = replace(self, num_frames=None) if "fps" in kwargs else self
        wanted = replace(wanted, **kwargs)
        return replace(wanted, min_frames=min(wanted.min_frames, wanted.max_frames))

    def sample(self, num_source_frames: int, source_fps: float) -> np.ndarray:
        """The indices of the frames to show: int64, ascending, evenly from the first to the last."""
        num_frames = self.num_frames
        if num_frames is None:
            num_frames = int(num_source_frames / source_fps * self.fps)
            num_frames = min(max(num_frames, self.min_frames), self.max_frames)
        return np.linspace(0, num_source_frames - 1, min(num_frames, num_source_frames)).round().astype(np.int64)

    def timestamps(self, indices: Sequence[int], source_fps: float) -> list[float]:
        """The time in seconds of each group of frames that makes one patch: the middle of its first and its last."""
        group = self.frame.temporal_patch_size
        times = [index / source_fps for index in indices]
        times += times[-1:] * (-len(times) % group)
        return [(times[start] + times[start + group - 1]) / 2 for start in range(0, len(times), group)]

    def fit(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Final (height, width) of the frames of a video, `smart_resize` in transformers.

        Sides become multiples of one token's, the video comes between its least and its most pixels. Raises
        RequestError when one side is more than 200 times the other.
        """
        side, group = self.frame.side_multiple, self.frame.temporal_patch_size
        num_frames = max(num_frames, group)  # a video of one frame shows it twice
        bounds = self.frame.min_pixels, self._most_pixels(num_frames)
        if min(height, width) < side:
            height, width = grown(height, width, side)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise _too_thin(height, width)
        return within_bounds(height, width, side, bounds, num_frames=num_frames,
                             num_counted=round(num_frames / group) * group)

    def _most_pixels(self, num_frames: int) -> int:
        most = self.frame.max_pixels
        if not self.cap_pixels_per_frame:
            return most
        cap = self.max_video_tokens * self.frame.side_multiple**2
        return max(min(cap, most // num_frames), int(self.frame.min_pixels * 1.05)) * num_frames

    def largest_frame(self, max_tokens: int) -> tuple[int, int]:
        """(height, width) with the most tokens, up to `max_tokens`, that a frame of any video can get."""
        group = self.frame.temporal_patch_size
        most = self._most_pixels(group) // group
        least = min(most, -(-self.frame.min_pixels // group))
        return replace(self.frame, min_pixels=least, max_pixels=most).largest_size(max_tokens)

    def seconds_per_pair(self, num_frames: int, num_source_frames: int, source_fps: float) -> float:
        """Seconds between pairs if `num_frames` are shown."""
        return self.frame.temporal_patch_size * num_source_frames / (num_frames * source_fps)


@dataclass(frozen=True, kw_only=True)
class FrameVideoSettings(VideoSettings):
    """Qwen2-VL's rules: the pixels of one frame are bounded, and pairs of frames are whole."""

    unread: ClassVar[frozenset[str]] = frozenset()
    bounds_each_frame: ClassVar[bool] = True
    samples_always: ClassVar[bool] = True
    max_video_tokens: int = 128_000
    """With `cap_pixels_per_frame` nine tenths of these are shared out evenly to the pairs of frames."""

    def sample(self, num_source_frames: int, source_fps: float) -> np.ndarray:
        group = self.frame.temporal_patch_size
        if self.num_frames is None:
            wanted = num_source_frames / source_fps * self.fps
            num_frames = math.floor(min(max(wanted, self.min_frames), self.max_frames) / group) * group
        else:
            num_frames = round(self.num_frames / group) * group
        # A video that is shorter than a group shows its first frame, repeated.
        num_frames = max(1, min(num_frames, num_source_frames // group * group))
        # Exact, where transformers rounds: its float32 may choose a neighbour, and which one depends on the processor.
        return np.arange(num_frames, dtype=np.int64) * num_source_frames // num_frames

    def fit(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        most = self.frame.max_pixels
        if self.cap_pixels_per_frame:
            num_pixels = int(self.max_video_tokens * self.frame.side_multiple**2 * 0.9)
            share = num_pixels * self.frame.temporal_patch_size // num_frames
            most = max(min(most, share), int(self.frame.min_pixels * 1.05))
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise _too_thin(height, width)
        return replace(self.frame, max_pixels=most).fit(height, width)

    def largest_frame(self, max_tokens: int) -> tuple[int, int]:
        return self.frame.largest_size(max_tokens)


def _too_thin(height: int, width: int) -> RequestError:
    return RequestError(f"the video is {width}x{height} pixels, a ratio of more than {MAX_ASPECT_RATIO}; crop it",
                        code="video_aspect_ratio")


# -- frames at a pace (GLM-4.1V, GLM-4.6V) -----------------------------------------------------------------------------

# Up to how many seconds a video has how many pairs of frames a second; a longer one is seen as one of the last length.
_PAIRS_PER_SECOND = ((30, 3.0), (300, 1.0), (2400, 0.5))
_LARGEST_DENOMINATOR = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Paced(VideoSettings, ABC):
    """An even number of frames: the last one is repeated where they are odd."""

    unread: ClassVar[frozenset[str]] = VideoSettings.unread | {
        "num_frames", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens"}

    def sample(self, num_source_frames: int, source_fps: float) -> np.ndarray:
        if self.num_frames is not None:
            chosen = _spread(num_source_frames, self.num_frames)
        else:
            chosen = list(dict.fromkeys(self.paced(num_source_frames, source_fps))) or [0]
            if len(chosen) > self.max_frames:
                chosen = [chosen[place] for place in _spread(len(chosen), self.max_frames)]
        return np.array(chosen + chosen[-1:] * (-len(chosen) % self.frame.temporal_patch_size), dtype=np.int64)

    @abstractmethod
    def paced(self, num_source_frames: int, source_fps: float) -> Iterable[int]:
        """Frames in ascending order; some may be there more than once."""

    def timestamps(self, indices: Sequence[int], source_fps: float) -> list[float]:
        """The time in seconds of the first frame of each group that makes one patch."""
        return [index / source_fps for index in indices[:: self.frame.temporal_patch_size]]


@dataclass(frozen=True, kw_only=True)
class SteadyVideoSettings(_Paced):
    """GLM-4.1V's rules: `fps` frames of each second, and of a longer video as many, spread over all of it."""

    max_duration: int = 300
    """Seconds up to which each one is seen."""

    def paced(self, num_source_frames: int, source_fps: float) -> Iterable[int]:
        seconds, most = _seconds(num_source_frames, source_fps), int(self.max_duration * self.fps)
        if seconds <= self.max_duration:
            count = max(1, math.floor(seconds * self.fps))
            places = [number * source_fps / self.fps for number in range(count)]
        elif num_source_frames <= most:
            return range(num_source_frames)
        else:
            places = [float(time) * source_fps for time in np.linspace(0, seconds, most)]
        return [min(num_source_frames - 1, math.ceil(place)) for place in places]


@dataclass(frozen=True, kw_only=True)
class SlowingVideoSettings(_Paced):
    """GLM-4.6V's rules: the longer a video is, the fewer frames of each second are seen."""

    unread: ClassVar[frozenset[str]] = _Paced.unread | {"fps", "max_duration"}
    fps: float = 0.0
    """0: by the length."""
    max_frames: int = 640

    def paced(self, num_source_frames: int, source_fps: float) -> Iterable[int]:
        seconds, longest = _seconds(num_source_frames, source_fps), _PAIRS_PER_SECOND[-1]
        _, pairs = next((pace for pace in _PAIRS_PER_SECOND if seconds <= pace[0]), longest)
        pace = self.fps or pairs * self.frame.temporal_patch_size
        wanted = min(int(min(seconds, longest[0]) * pace), self.max_frames)
        if num_source_frames < wanted:
            return _between(0, num_source_frames - 1, wanted)
        chosen = _by_the_clock(num_source_frames, 1 / source_fps, 1 / pace, int(seconds))
        if len(chosen) < wanted:
            return _between(chosen[0], chosen[-1], wanted)
        return chosen if len(chosen) == wanted else _between(0, num_source_frames - 1, wanted)


def _seconds(num_frames: int, fps: float) -> float:
    """A file's rate is a fraction, and so is the length: rounded once, a whole number of seconds is one."""
    return float(num_frames / Fraction(fps).limit_denominator(_LARGEST_DENOMINATOR))


def _by_the_clock(num_frames: int, frame_seconds: float, step_seconds: float, end_seconds: int) -> list[int]:
    """The first frame at or behind each step's time, as long as that is before the end; one at least."""
    chosen, due = [], 0.0
    for index in range(num_frames):
        if index * frame_seconds >= due:
            chosen.append(index)
            due += step_seconds
            if due >= end_seconds:
                break
    return chosen


def _between(first: int, last: int, count: int) -> list[int]:
    places: list[int] = np.linspace(first, last, count, dtype=np.int64).tolist()
    return places


def _spread(num_frames: int, count: int) -> list[int]:
    """At most `count` frames, evenly from the first to the last."""
    places: list[int] = np.linspace(0, num_frames - 1, min(count, num_frames)).round().astype(np.int64).tolist()
    return places

# -- files of a checkpoint ---------------------------------------------------------------------------------------------


_IMAGES_FILE = "preprocessor_config.json"
_RULES: dict[VideoForm, type[VideoSettings]] = {
    VideoForm.TIMESTAMPS: VideoSettings, VideoForm.STEPS: FrameVideoSettings, VideoForm.SECONDS: FrameVideoSettings,
    VideoForm.WHOLE_SECONDS_BEHIND: SteadyVideoSettings, VideoForm.SECONDS_BEHIND: SlowingVideoSettings}
_COUNTS = ("min_frames", "max_frames", "max_video_tokens", "max_duration")
_GLM_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}
# Defaults of the files' fields, by rules.
_DEFAULTS: dict[type[VideoSettings], dict[str, Any]] = {
    VideoSettings: {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
    FrameVideoSettings: {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}},
    SteadyVideoSettings: {"size": _GLM_SIZE},
    SlowingVideoSettings: {"size": _GLM_SIZE},
}


def read_video_settings(folder: Path, config: Mapping[str, Any], *, form: VideoForm = VideoForm.TIMESTAMPS,
                        fps: float | None = None, max_frames: int | None = None, num_frames: int | None = None,
                        min_pixels: int | None = None, max_pixels: int | None = None) -> VideoSettings:
    """Settings of the checkpoint in `folder` for a family of this form, with the user's own where given. `min_pixels`
    and `max_pixels` bound each frame if the rules bound frames.

    The files are read in transformers' order. Raises ModelError if there is none, or if its videos cannot be
    prepared.
    """
    values, source = _read_values(folder)
    try:
        settings = _from_values(values, _RULES[form], is_of_images=source == _IMAGES_FILE)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder / source}: {error}; compare it with the original checkpoint") from error
    check_against_tower(settings.frame, config["vision_config"], source)
    if settings.bounds_each_frame:
        settings = replace(settings, frame=_bounded(settings.frame, min_pixels, max_pixels, source))
    if fps is not None:
        settings = replace(settings, fps=fps, num_frames=None)
    if num_frames is not None:
        settings = replace(settings, num_frames=num_frames)
    if max_frames is not None:
        settings = replace(settings, max_frames=max_frames, min_frames=min(settings.min_frames, max_frames))
    return settings


def _bounded(frame: ImageSettings, min_pixels: int | None, max_pixels: int | None, source: str) -> ImageSettings:
    wanted = replace(frame, min_pixels=min_pixels or frame.min_pixels, max_pixels=max_pixels or frame.max_pixels)
    if max_pixels is not None and min_pixels is None:  # a smaller frame was requested
        wanted = replace(wanted, min_pixels=min(wanted.min_pixels, wanted.max_pixels))
    if wanted.min_pixels > wanted.max_pixels:
        raise ModelError(f"image_min_pixels {wanted.min_pixels} is more than a frame's {wanted.max_pixels} in "
                         f"{source}; set image_max_pixels, too")
    return wanted


def _read_values(folder: Path) -> tuple[Mapping[str, Any], str]:
    nested = (read_json(folder, "processor_config.json") or {}).get("video_processor")
    if isinstance(nested, Mapping):
        return nested, "processor_config.json"
    for name in ("video_preprocessor_config.json", _IMAGES_FILE):
        values = read_json(folder, name)
        if isinstance(values, Mapping):
            return values, name
    raise ModelError(f"{folder}: video_preprocessor_config.json is missing, which says how videos are prepared")


def _from_values(values: Mapping[str, Any], rules: type[VideoSettings], *, is_of_images: bool) -> VideoSettings:
    """`is_of_images`: the file's min_pixels and max_pixels are of images."""
    if not rules.samples_always and not values.get("do_sample_frames", True):
        raise ValueError("do_sample_frames is false, but videos are sampled here")
    unread = rules.unread | {"min_pixels", "max_pixels"} if is_of_images else rules.unread
    given = {name: value for name, value in values.items() if value is not None and name not in unread}
    own = {**_DEFAULTS[rules], **given}
    size = own["size"]
    if not isinstance(size, Mapping) or not size.get("shortest_edge") or not size.get("longest_edge"):
        raise ValueError(f"size is {size!r}, shortest_edge and longest_edge are needed")
    frame = settings_from(own)
    default = rules(frame=frame)
    fps = float(own.get("fps") or default.fps)
    if fps != default.fps and not 0 < fps <= MAX_VIDEO_FPS:
        raise ValueError(f"fps is {fps}, not above 0 and up to {MAX_VIDEO_FPS:g}")
    num_frames = own.get("num_frames")
    return rules(
        frame=frame, fps=fps, num_frames=None if num_frames is None else positive_integer(num_frames),
        cap_pixels_per_frame=bool(own.get("cap_pixels_per_frame")),
        **{name: positive_integer(own.get(name), getattr(default, name)) for name in _COUNTS if hasattr(default, name)})
