"""vLLM's `mm_processor_kwargs` of a request: bounds of its images and sampling of its videos. Knows no pixels.

`min_pixels` and `max_pixels` bound images, and each frame where a family bounds frames. `fps`, `num_frames` and
`max_frames` sample videos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from npu_runner.config import MAX_VIDEO_FPS
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.request.limits import LIMITS, field_error, shown, wrong_type

FIELD = "mm_processor_kwargs"
IMAGE_BOUNDS = ("min_pixels", "max_pixels")
_ALL_TOKENS = 1 << 40
_MOST = {
    "fps": MAX_VIDEO_FPS, "num_frames": LIMITS.max_video_frames, "max_frames": LIMITS.max_video_frames,
    "min_pixels": LIMITS.max_source_pixels, "max_pixels": LIMITS.max_source_pixels}


def checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`mm_processor_kwargs` without values that change nothing. Raises RequestError naming an invalid one."""
    if not isinstance(kwargs, Mapping):
        raise wrong_type(FIELD, "an object", kwargs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    for name, value in given.items():
        where = f"{FIELD}.{str(name)[:60]}"
        if name not in _MOST:
            raise field_error(where, f"not supported; {', '.join(_MOST)} are", "unsupported_field")
        is_number = isinstance(value, (int, float) if name == "fps" else int) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MOST[name]:
            raise field_error(where, f"{shown(value)} is not above 0 and up to {_MOST[name]:g}")
    if "fps" in given and "num_frames" in given:
        raise field_error(FIELD, "fps and num_frames contradict each other; give one of them")
    return given


def bounded(settings: ImageSettings, given: Mapping[str, Any], loaded: ImageSettings | None = None) -> ImageSettings:
    """`settings` with the bounds of a request's checked kwargs. `loaded`: the settings for which memory was measured;
    None: the same.

    Raises RequestError for contradicting bounds, and for a bound above the measured one.
    """
    requested, loaded = {name: given[name] for name in IMAGE_BOUNDS if name in given}, loaded or settings
    if not requested:
        return settings
    for name, value in requested.items():
        if value > loaded.max_pixels:
            where = f"{FIELD}.{name}"
            raise field_error(where, f"{value} is more than the {loaded.max_pixels} that the model was loaded for "
                              "(image_max_pixels); load it with more")
    wanted = replace(settings, **requested)
    if "max_pixels" in requested and "min_pixels" not in requested:  # a smaller image was requested
        wanted = replace(wanted, min_pixels=min(wanted.min_pixels, wanted.max_pixels))
    if wanted.min_pixels > wanted.max_pixels:
        raise field_error(FIELD, f"min_pixels {wanted.min_pixels} is more than max_pixels {wanted.max_pixels}")
    if (num_tokens := most_tokens(wanted)) > (most := most_tokens(loaded)):
        # Growing rounds both sides up: an image can then be larger than max_pixels.
        raise field_error(f"{FIELD}.min_pixels", f"{wanted.min_pixels} makes images of up to {num_tokens} tokens, and "
                          f"the model was loaded for {most}; lower it, or load the model with image_min_pixels")
    return wanted


@lru_cache(maxsize=64)
def most_tokens(settings: ImageSettings) -> int:
    return settings.num_tokens(*settings.largest_size(_ALL_TOKENS))
