"""Patches of images of any sizes, cut and normalised together, are bit for bit those of the definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from npu_runner.models.vision.patches import cut_patches
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.images import image_input
from npu_runner.request.prompt_inputs import ImageInput

# (rows, columns) in merged tokens.
GRIDS = [(1, 1), (3, 2), (1, 4), (3, 2), (5, 1)]
SETTINGS = ImageSettings(image_mean=(0.48, 0.45, 0.41), image_std=(0.27, 0.26, 0.28))


def images(settings: ImageSettings, num_frames: int = 1) -> list[ImageInput]:
    rng, side = np.random.default_rng(0), settings.side_multiple
    return [image_input(rng.integers(0, 256, (rows * side, columns * side, 3 * num_frames), dtype=np.uint8), settings)
            for rows, columns in GRIDS]


def definition(image: ImageInput, settings: ImageSettings) -> list[np.ndarray]:
    """The patches of one image, one by one: block by block, and row by row within a block."""
    patch, merge = settings.patch_size, settings.merge_size
    _, rows, columns = image.grid_thw
    found = []
    for block_row, block_column in np.ndindex(rows // merge, columns // merge):
        for row, column in np.ndindex(merge, merge):
            top, left = (block_row * merge + row) * patch, (block_column * merge + column) * patch
            pixels = image.pixels_HWC[top : top + patch, left : left + patch].astype(np.float32)
            pixels = pixels.reshape(patch, patch, -1, 3) * np.float32(settings.rescale_factor)
            pixels = (pixels - np.float32(settings.image_mean)) / np.float32(settings.image_std)
            found.append(pixels.ravel())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch_size", [16, 14, 5])
@pytest.mark.parametrize("few_bytes", [0, 1 << 20], ids=["threads", "one thread"])
def test_images_and_frames_of_all_sizes_cut_together(few_bytes: int, patch_size: int, dtype: torch.dtype,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 48, 42 and 15 bytes are gathered four, two and one at a time."""
    monkeypatch.setattr("npu_runner.models.vision.patches._FEW_BYTES", few_bytes)
    settings = replace(SETTINGS, patch_size=patch_size)
    groups = [images(settings), images(settings, num_frames=2)]
    beside = [[np.arange(7, dtype=np.int32), np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)], []]
    found = cut_patches(groups, beside, lambda image: settings, torch.device("cpu"), dtype)
    assert len(found) == len(groups)
    for group, sent, (patches_PX, arrived) in zip(groups, beside, found, strict=True):
        expected = np.stack([patch for image in group for patch in definition(image, settings)])
        torch.testing.assert_close(patches_PX, torch.from_numpy(expected).to(dtype), rtol=0, atol=0)
        assert len(arrived) == len(sent)
        assert all(tensor.untyped_storage().nbytes() < 1024 for tensor in arrived), "pixels are kept in memory, too"
        for tensor, array in zip(arrived, sent, strict=True):
            torch.testing.assert_close(tensor, torch.from_numpy(array), rtol=0, atol=0)
