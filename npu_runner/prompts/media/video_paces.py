"""Which frames of a video GLM's families see: a pace by the clock, where other families spread a count evenly. Knows
nothing of files or pixels.

The rules are those of transformers' video processors for GLM-4.1V and GLM-4.6V. Sizes are as in VideoSettings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from npu_runner.prompts.media.image_settings import positive_integer
from npu_runner.prompts.media.video_settings import VideoSettings

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
            chosen = _distinct(self.paced(num_source_frames, source_fps)) or [0]
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

    @classmethod
    def own_fields(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"max_duration": positive_integer(values.get("max_duration"), cls.max_duration)}

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
    """Rounded down."""
    places: list[int] = np.linspace(first, last, count, dtype=np.int64).tolist()
    return places


def _spread(num_frames: int, count: int) -> list[int]:
    """At most `count` of so many frames, evenly from the first to the last."""
    places: list[int] = np.linspace(0, num_frames - 1, min(count, num_frames)).round().astype(np.int64).tolist()
    return places


def _distinct(indices: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(indices))
