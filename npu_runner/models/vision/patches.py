"""From images' bytes to the patches that a tower takes: one copy and a few launches for all images of a step, of
whatever sizes. Knows no tower and no cache.

A run is a row of pixels within a patch: what lies together in an image and in a patch alike. In the device's memory
all images are one row of runs, and patches gather theirs.

P patches of all images of a group, R runs of them, X values of a patch (row, column, frame of a video, channel).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.models.vision.parts import block_order
from npu_runner.platforms.transfers import Shape, upload_filled
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.request.prompt_inputs import ImageInput

_T = TypeVar("_T")

# (bytes, dtype) that runs are gathered as: the widest that a run divides into, so that there is least to gather.
_GATHERED = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
# The number of threads that copy a step's images. One copies them if they have fewer bytes than the other number.
_NUM_COPYING, _FEW_BYTES = 4, 2**20
# The sizes of images whose runs are kept: a document's pages have few, and 16 megapixels have 4 MB of them.
_NUM_SIZES = 8


def cut_patches(groups: Sequence[Sequence[ImageInput]], beside: Sequence[Sequence[np.ndarray]],
                settings_of: Callable[[ImageInput], ImageSettings], device: torch.device,
                dtype: torch.dtype) -> list[tuple[Tensor, list[Tensor]]]:
    """The patches (P, X) of each group, image after image, each in merge-block order. With them the group's arrays of
    `beside`, int32 and float32, which travel with the pixels.

    That order is the one of transformers' Qwen2-VL image processor; PatchEmbed arranges its weight by X.

    Rescaled, less the mean, over the deviation, each in float32 as transformers does it, then rounded to `dtype`.
    Images of one group have patches of one length; `settings_of` them are equal.
    """
    settings = [settings_of(group[0]) for group in groups]
    guests = [array for arrays in beside for array in arrays]
    shapes: list[Shape] = [(array.shape, array.dtype.name) for array in guests]
    for group, its in zip(groups, settings, strict=True):
        num_values, num_runs = _num_values(group[0], its), sum(_num_patches(image) * its.patch_size for image in group)
        shapes += [((2, num_values), "float32"), ((num_runs,), "int32"),
                   ((sum(image.pixels_HWC.size for image in group),), "uint8")]

    def fill(places: Sequence[np.ndarray]) -> None:
        for place, array in zip(places, guests, strict=False):
            np.copyto(place, array)
        own = iter(places[len(guests) :])
        for group, its in zip(groups, settings, strict=True):
            scales_2X, runs_R, pixels = islice(own, 3)
            scales_2X[:] = _mean_and_deviation(its, scales_2X.shape[1])
            _fill_runs(group, its, runs_R)
            _fill_pixels(group, pixels)

    # Pixels are let go of here, and what came with them is not.
    sent = iter(upload_filled(shapes, fill, device, num_kept=len(guests)))
    arrived = [list(islice(sent, len(arrays))) for arrays in beside]
    patches = []
    for its in settings:
        scales_2X, runs_R, pixels = islice(sent, 3)
        patches.append(_normalised(_gathered(runs_R, pixels, its.patch_size), scales_2X, its, dtype))
    return list(zip(patches, arrived, strict=True))


def _fill_runs(group: Sequence[ImageInput], settings: ImageSettings, runs_R: np.ndarray) -> None:
    """Which run of all the group's images each row of each patch is."""
    first_run = 0
    for image in group:
        own = _runs(*image.grid_thw[1:], settings.patch_size, settings.merge_size)
        np.add(own, first_run, out=runs_R[first_run : first_run + len(own)])
        first_run += len(own)


@functools.lru_cache(maxsize=_NUM_SIZES)
def _runs(rows: int, columns: int, patch: int, merge: int) -> np.ndarray:
    """(R,) int32, of one image."""
    places_P2 = block_order(rows, columns, merge)
    top_P = places_P2[:, 0] * (patch * columns) + places_P2[:, 1]
    return (top_P[:, None] + np.arange(patch, dtype=np.int32) * columns).ravel()


def _fill_pixels(group: Sequence[ImageInput], pixels: np.ndarray) -> None:
    """Image after image. Memory of a preprocessing worker is mapped as it is read, which several threads do at once."""
    copies, start = list[tuple[np.ndarray, np.ndarray]](), 0
    for image in group:
        stop = start + image.pixels_HWC.size
        copies.append((pixels[start:stop].reshape(image.pixels_HWC.shape), image.pixels_HWC))
        start = stop
    if len(pixels) < _FEW_BYTES:
        _copy(copies)
    else:  # one call for each thread: small images are copied sooner than threads are told of them
        for _ in _copying_threads().map(_copy, (copies[first::_NUM_COPYING] for first in range(_NUM_COPYING))):
            pass


def _copy(copies: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in copies:
        np.copyto(target, source)


@functools.cache
def _copying_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_COPYING, "pixels")


def _gathered(runs_R: Tensor, pixels: Tensor, patch_size: int) -> Tensor:
    """(P, X) uint8."""
    run_bytes = len(pixels) // len(runs_R)
    width, dtype = next((width, dtype) for width, dtype in _GATHERED if run_bytes % width == 0)
    runs = F.embedding(runs_R, pixels.view(dtype).view(-1, run_bytes // width))
    return runs.view(torch.uint8).view(-1, run_bytes * patch_size)


def _normalised(patches_PX: Tensor, scales_2X: Tensor, settings: ImageSettings, dtype: torch.dtype) -> Tensor:
    mean_X, deviation_X = scales_2X
    return patches_PX.float().mul_(settings.rescale_factor).sub_(mean_X).div_(deviation_X).to(dtype)


def _mean_and_deviation(settings: ImageSettings, num_values: int) -> np.ndarray:
    """(2, X), of each value of a patch."""
    colours = np.array((settings.image_mean, settings.image_std), dtype=np.float32)
    return np.tile(colours, num_values // colours.shape[1])


def _num_values(image: ImageInput, settings: ImageSettings) -> int:
    return settings.patch_size**2 * image.pixels_HWC.shape[2]


def _num_patches(image: ImageInput) -> int:
    return math.prod(image.grid_thw)


def groups_within(items: Iterable[_T], size_of: Callable[[_T], int], most: int | None) -> list[list[_T]]:
    """`items` cut wherever their sizes would add up to more than `most`; None: not at all."""
    groups: list[list[_T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not groups or (most is not None and size > room):
            groups.append([])
            room = most or 0
        groups[-1].append(item)
        room -= size
    return groups
