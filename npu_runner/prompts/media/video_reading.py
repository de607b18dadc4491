"""What a checkpoint's files say of videos, as settings. Knows nothing of videos themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import read_json
from npu_runner.config import MAX_VIDEO_FPS
from npu_runner.errors import ModelError
from npu_runner.prompts.media.image_settings import ImageSettings, check_against_tower, positive_integer, settings_from
from npu_runner.prompts.media.video_settings import (
    FrameVideoSettings,
    SlowingVideoSettings,
    SteadyVideoSettings,
    VideoForm,
    VideoSettings,
)

_IMAGES_FILE = "preprocessor_config.json"
_RULES: dict[VideoForm, type[VideoSettings]] = {
    VideoForm.TIMESTAMPS: VideoSettings, VideoForm.STEPS: FrameVideoSettings, VideoForm.SECONDS: FrameVideoSettings,
    VideoForm.WHOLE_SECONDS_BEHIND: SteadyVideoSettings, VideoForm.SECONDS_BEHIND: SlowingVideoSettings}
_GLM_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}
# What files do not say, by the rules that they are for.
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
    and `max_pixels`, which are of images, bound each frame where the rules do so.

    The files are looked at in transformers' order. Raises ModelError for a checkpoint that has none of them, or one
    whose videos we cannot prepare.
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
    if max_pixels is not None and min_pixels is None:  # to see less is what was asked for
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
        min_frames=positive_integer(own.get("min_frames"), default.min_frames),
        max_frames=positive_integer(own.get("max_frames"), default.max_frames),
        cap_pixels_per_frame=bool(own.get("cap_pixels_per_frame")),
        max_video_tokens=positive_integer(own.get("max_video_tokens"), default.max_video_tokens),
        **rules.own_fields(own))
