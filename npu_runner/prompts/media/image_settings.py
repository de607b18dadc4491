"""A checkpoint's settings for images: sizes, patches, normalisation. Knows nothing of pixels."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import read_json
from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.request.limits import shown


class Resizing(Enum):
    """Sides become multiples of one token's, and the area comes between two bounds. Families differ in the rest."""

    AREA = "area"
    """No further rule (Qwen2-VL)."""
    SHORT_SIDE = "short_side"
    """A side shorter than a token's first becomes as long, and the other grows with it (PaddleOCR-VL)."""
    FRAMES = "frames"
    """An image with such a side first grows as a whole, and the area is that of all frames of a patch (GLM-4V)."""

    def enlarged(self, height: int, width: int, side: int) -> tuple[int, int]:
        """(height, width) before the area is bounded. `side`: one token's side in pixels."""
        if min(height, width) >= side or self is Resizing.AREA:
            return height, width
        return _with_a_longer_side(height, width, side) if self is Resizing.SHORT_SIDE else grown(height, width, side)


def _with_a_longer_side(height: int, width: int, side: int) -> tuple[int, int]:
    if height < side:
        height, width = side, round(width * side / height)
    if width < side:
        height, width = round(height * side / width), side
    return height, width


def grown(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width), scaled up so that the shorter one is about `side`."""
    scale = max(side / height, side / width)
    return int(height * scale), int(width * scale)


def within_bounds(height: int, width: int, side: int, bounds: tuple[int, int], *, num_frames: int = 1,
                  num_counted: int = 1) -> tuple[int, int]:
    """(height, width) as multiples of `side`, in a shape as near as the bounds on the area allow.

    `bounds`: the least and the most pixels of all frames. `num_counted` frames decide whether an image is out of them
    (incomplete groups are rounded); it is then scaled by the pixels of `num_frames`.
    """
    least, most = bounds
    rounded = round(height / side) * side, round(width / side) * side
    num_pixels = num_counted * rounded[0] * rounded[1]
    if num_pixels > most:
        shrink = math.sqrt((num_frames * height * width) / most)
        return (max(side, math.floor(height / shrink / side) * side),
                max(side, math.floor(width / shrink / side) * side))
    if num_pixels < least:
        grow = math.sqrt(least / (num_frames * height * width))
        return math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
    return rounded


MAX_ASPECT_RATIO = 200
LOW_DETAIL_PIXELS = 512 * 512
BICUBIC = 3
RESAMPLING = (0, 1, 2, 3, 4, 5)  # Pillow's numbers, which is also what checkpoints write
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """All settings that shape the vision tower's input for an image.

    The device computes `(pixel * rescale_factor - image_mean) / image_std` per channel. Without rescaling or
    normalisation these are 1, 0 and 1. Defaults are those of transformers' Qwen2-VL image processor; a family with
    others has an instance of its own (`LoadStrategy.image_defaults`).
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    resample: int = BICUBIC
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    resizing: Resizing = Resizing.AREA
    """The family's rule, which no file names."""

    @property
    def num_counted_frames(self) -> int:
        """Frames whose pixels min_pixels and max_pixels bound together, for an image."""
        return self.temporal_patch_size if self.resizing is Resizing.FRAMES else 1

    @property
    def side_multiple(self) -> int:
        """Height and width of a resized image are multiples of this: one merged token's side in pixels."""
        return self.patch_size * self.merge_size

    def to_json(self) -> dict[str, Any]:
        """The fields, for a manifest. Qwen2-VL's resizing is not named: manifests are older than the choice."""
        values = {**asdict(self), "resizing": self.resizing.value}
        return {name: value for name, value in values.items() if value != Resizing.AREA.value}

    def digest(self) -> bytes:
        """16 bytes that differ when any setting differs."""
        text = json.dumps({**asdict(self), "resizing": self.resizing.value}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def num_tokens(self, height: int, width: int) -> int:
        """Prompt tokens of an image that already has its final size."""
        return (height // self.side_multiple) * (width // self.side_multiple)

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Final (height, width) of an image: `smart_resize` of the family's image processor.

        Sides become multiples of `side_multiple`, the area comes between min_pixels and max_pixels, the shape stays
        as near as that allows. Raises RequestError when one side is more than 200 times the other.
        """
        if min(height, width) < 1:
            raise RequestError(f"the image is {width}x{height} pixels: it has no area", code="image_empty")
        side, frames = self.side_multiple, self.num_counted_frames
        tall, wide = self.resizing.enlarged(height, width, side)
        ratio = max(tall, wide) / min(tall, wide)
        if ratio > MAX_ASPECT_RATIO:
            raise RequestError(
                f"the image is {width}x{height} pixels, a ratio of {ratio:.1f}; the model takes at most "
                f"{MAX_ASPECT_RATIO}; crop it or cut it into several images",
                code="image_aspect_ratio")
        return within_bounds(tall, wide, side, (self.min_pixels, self.max_pixels), num_frames=frames,
                             num_counted=frames)

    def with_low_detail(self) -> ImageSettings:
        """OpenAI's `detail: low`: no more pixels than an image of 512 x 512, as far as the model takes so few."""
        most = max(self.min_pixels, self.num_counted_frames * LOW_DETAIL_PIXELS)
        return replace(self, max_pixels=min(self.max_pixels, most))

    def largest_size(self, max_tokens: int) -> tuple[int, int]:
        """(height, width) with the most tokens that `fit` can ever return, up to `max_tokens`; the squarest of equals.

        Where min_pixels are more than that, `fit` returns nothing so small: then it is what a device can try.
        """
        candidates = ((short, min(long, max_tokens // short))
                      for short, long in self._largest_candidates() if short <= max_tokens)
        units_hw = max(candidates, key=lambda hw: (hw[0] * hw[1], min(hw)))
        return units_hw[0] * self.side_multiple, units_hw[1] * self.side_multiple

    def _largest_candidates(self) -> Iterator[tuple[int, int]]:
        """Short and long side, in tokens, of the widest result of each branch of `fit` for each short side."""
        area = self.num_counted_frames * self.side_multiple**2
        most, least = self.max_pixels / area, self.min_pixels / area
        # Shrinking never makes a side shorter than one token, so a thin strip can exceed max_pixels.
        yield 1, max(1, math.floor(math.sqrt(most * MAX_ASPECT_RATIO)))
        for short in range(1, math.isqrt(math.floor(most)) + 1):
            # Rounding takes less than a token from the short side.
            yield short, min(math.floor(most) // short, MAX_ASPECT_RATIO * (short + 1))
        # Growing rounds both sides up, so an image just over `short - 1` tokens high becomes `short` high.
        thinnest = math.sqrt(least / MAX_ASPECT_RATIO)
        for short in range(max(1, math.ceil(thinnest)), math.ceil(math.sqrt(least)) + 1):
            yield short, max(short, math.ceil(least / max(short - 1, thinnest)))


QWEN2_VL_IMAGES = ImageSettings()


def read_image_settings(folder: Path, config: Mapping[str, Any], *, default: ImageSettings = QWEN2_VL_IMAGES,
                        min_pixels: int | None = None, max_pixels: int | None = None) -> ImageSettings:
    """Settings of the checkpoint in `folder`, with the user's bounds on an image's area where given. `default`: the
    family's, for what its file does not say.

    `processor_config.json` (its `image_processor` entry) goes before `preprocessor_config.json`, as in transformers.
    Raises ModelError for a checkpoint whose images we cannot prepare, ConfigError for bounds that contradict.
    """
    values = (read_json(folder, "processor_config.json") or {}).get("image_processor")
    source = "processor_config.json"
    if values is None:
        source = "preprocessor_config.json"
        values = read_json(folder, source)
    if not isinstance(values, dict):
        raise ModelError(f"{folder / source} is missing or has no settings; a model with vision needs it")
    try:
        settings = settings_from(values, default)
    except (TypeError, ValueError, KeyError, ModelError) as error:
        raise ModelError(f"{folder / source}: {error}; compare it with the original checkpoint") from error
    check_against_tower(settings, _tower_of(config["vision_config"], default), source)
    frames = settings.num_counted_frames
    settings = replace(
        settings, min_pixels=settings.min_pixels if min_pixels is None else frames * min_pixels,
        max_pixels=settings.max_pixels if max_pixels is None else frames * max_pixels)
    if settings.min_pixels > settings.max_pixels:
        raise ConfigError(
            f"image_min_pixels {settings.min_pixels // frames} is more than image_max_pixels "
            f"{settings.max_pixels // frames} (what is not given comes from {source}); set both")
    return settings


def _tower_of(vision_config: Mapping[str, Any], default: ImageSettings) -> Mapping[str, Any]:
    """`vision_config`. In that of a family whose tower takes one frame, a number of frames means nothing."""
    return {**vision_config, "temporal_patch_size": 1} if default.temporal_patch_size == 1 else vision_config


def settings_from(values: Mapping[str, Any], default: ImageSettings = QWEN2_VL_IMAGES) -> ImageSettings:
    """The settings of a preprocessor's file, with `default` for the missing ones. Raises TypeError, ValueError or
    KeyError for another kind of file, ModelError for a `size` that does not bound an image's area."""
    for name in ("do_center_crop", "do_pad"):
        if values.get(name):
            raise ValueError(f"{name} is set, which this runner does not do")
    if not values.get("do_resize", True):
        raise ValueError("do_resize is false, but the vision tower needs sides that are multiples of its patches")
    # GLM-4V's processor reads `size` alone.
    own = {} if default.resizing is Resizing.FRAMES else values
    size = _edges(values.get("size"), own)
    rescales, normalises = values.get("do_rescale", True), values.get("do_normalize", True)
    resample = values.get("resample")
    if resample not in (None, *RESAMPLING):
        raise ValueError(f"resample is {resample!r}, not one of Pillow's filters {RESAMPLING}")
    settings = replace(
        default,
        min_pixels=positive_integer(own.get("min_pixels"), size.get("shortest_edge"), default.min_pixels),
        max_pixels=positive_integer(own.get("max_pixels"), size.get("longest_edge"), default.max_pixels),
        patch_size=positive_integer(values.get("patch_size"), default.patch_size),
        temporal_patch_size=positive_integer(values.get("temporal_patch_size"), default.temporal_patch_size),
        merge_size=positive_integer(values.get("merge_size"), default.merge_size),
        resample=default.resample if resample is None else resample,
        rescale_factor=float(values.get("rescale_factor", default.rescale_factor)) if rescales else 1.0,
        image_mean=_channels(values.get("image_mean", default.image_mean)) if normalises else (0.0,) * 3,
        image_std=_channels(values.get("image_std", default.image_std)) if normalises else (1.0,) * 3)
    if 0.0 in settings.image_std:
        raise ValueError(f"image_std {settings.image_std} divides by zero")
    if default.temporal_patch_size == 1 != settings.temporal_patch_size:
        raise ValueError(f"temporal_patch_size is {settings.temporal_patch_size}; this family's tower takes one frame")
    return settings


def _edges(size: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """`shortest_edge` and `longest_edge`: a size has both and nothing else, but for what min_pixels and max_pixels of
    `own` replace. transformers refuses any other, too."""
    if size is None:
        return {}
    edges = dict(size) if isinstance(size, Mapping) else {"": size}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if own.get(name) is not None:
            edges[edge] = own[name]
            edges.pop(name, None)
    edges = {name: value for name, value in edges.items() if value is not None}
    if edges.keys() != {"shortest_edge", "longest_edge"}:
        raise ModelError(f"size is {shown(size, 100)}; shortest_edge and longest_edge are needed, and nothing else")
    return edges


def positive_integer(*values: Any) -> int:
    """The first that is not None. Raises ValueError where it is no integer above 0."""
    value = next(value for value in values if value is not None)
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{value!r} is not a positive integer")
    return int(value)


def _channels(values: Any) -> tuple[float, ...]:
    channels = tuple(float(value) for value in (values if isinstance(values, (list, tuple)) else [values] * 3))
    if len(channels) != 3:
        raise ValueError(f"{values!r} needs one number per colour")
    return channels


def check_against_tower(settings: ImageSettings, vision_config: Mapping[str, Any], source: str) -> None:
    """Raises ModelError where `source` and config.json mean different patches."""
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        expected = vision_config.get(theirs)
        if expected is not None and expected != getattr(settings, ours):
            raise ModelError(
                f"{ours} is {getattr(settings, ours)} in {source} but {theirs} is {expected} in config.json's "
                f"vision_config; one of the two files belongs to another checkpoint")
