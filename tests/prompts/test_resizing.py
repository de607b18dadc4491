"""Sizes and pixels of images, by each family's rule, are those of transformers' image processor of that family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.prompts.media.image_settings import ImageSettings, Resizing, read_image_settings, settings_from
from npu_runner.prompts.media.images import prepare_image
from tests.full_set import examples

PADDLE = ImageSettings(resizing=Resizing.SHORT_SIDE, min_pixels=384**2, max_pixels=1536**2, temporal_patch_size=1)
GLM = ImageSettings(resizing=Resizing.FRAMES, min_pixels=112**2, max_pixels=28 * 28 * 15000)
VISION = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
ANY = 1 << 30


def processor_of(name: str, **given: Any) -> Any:
    """transformers' processor that works with Pillow alone."""
    if name == "paddleocr_vl":
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

        return PaddleOCRVLImageProcessorPil(**given)
    if name == "glm4v":
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        return Glm4vImageProcessorPil(**given)
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    return Glm46VImageProcessorPil(**given)


FAMILIES = [("paddleocr_vl", PADDLE), ("glm4v", GLM), ("glm46v", GLM)]


@pytest.mark.parametrize(("name", "default"), FAMILIES)
def test_what_a_file_does_not_say_is_as_in_transformers(name: str, default: ImageSettings) -> None:
    theirs = processor_of(name)
    assert settings_from({}, default) == replace(
        default, min_pixels=theirs.size["shortest_edge"], max_pixels=theirs.size["longest_edge"],
        patch_size=theirs.patch_size, temporal_patch_size=theirs.temporal_patch_size, merge_size=theirs.merge_size,
        resample=int(theirs.resample), rescale_factor=theirs.rescale_factor, image_mean=tuple(theirs.image_mean),
        image_std=tuple(theirs.image_std))


@pytest.mark.parametrize(("name", "default"), FAMILIES)
def test_both_spellings_of_bounds_are_read_as_in_transformers(name: str, default: ImageSettings) -> None:
    bounds = {"size": {"shortest_edge": 5000, "longest_edge": 90000}}
    for values in (bounds, {"min_pixels": 6000, "max_pixels": 70000}, {**bounds, "min_pixels": 6000}):
        theirs = processor_of(name, **values).size
        ours = settings_from(values, default)
        assert (ours.min_pixels, ours.max_pixels) == (theirs["shortest_edge"], theirs["longest_edge"]), values


sides = st.integers(1, 60) | st.integers(1, 9000)


@pytest.mark.parametrize(("name", "default"), FAMILIES[:2])
@settings(max_examples=examples(300), deadline=None)
@given(width=sides, height=sides, low=st.integers(1, 1 << 20), high=st.integers(1, 1 << 24),
       patch=st.sampled_from([14, 16]))
def test_sizes_equal_transformers_and_none_exceeds_the_largest(
        name: str, default: ImageSettings, width: int, height: int, low: int, high: int, patch: int) -> None:
    ours = replace(default, min_pixels=min(low, high), max_pixels=max(low, high), patch_size=patch)
    try:
        expected = sizes_of(name, height, width, ours)
    except ValueError:
        with pytest.raises(RequestError, match="ratio") as refused:
            ours.fit(height, width)
        assert refused.value.code == "image_aspect_ratio"
        return
    assert ours.fit(height, width) == expected
    assert ours.num_tokens(*expected) <= ours.num_tokens(*ours.largest_size(ANY))


@pytest.mark.parametrize(("name", "default"), FAMILIES[:2])
def test_sizes_equal_transformers_for_all_thin_images(name: str, default: ImageSettings) -> None:
    """Where rounding differently shows: the other side is scaled by 28 / 11 and the like."""
    ours = replace(default, min_pixels=1)
    for height in range(1, 29):
        for width in range(height, min(200 * height, 170)):
            for size in ((height, width), (width, height)):
                assert ours.fit(*size) == sizes_of(name, *size, ours), size


@pytest.mark.parametrize("default", [PADDLE, GLM])
def test_the_largest_size_can_be_reached(default: ImageSettings) -> None:
    largest = default.num_tokens(*default.largest_size(ANY))
    assert default.num_tokens(*default.fit(9000, 9000)) >= 0.9 * largest


def sizes_of(name: str, height: int, width: int, ours: ImageSettings) -> tuple[int, int]:
    """By the function of each processor's module that its `resize` calls."""
    bounds = {"min_pixels": ours.min_pixels, "max_pixels": ours.max_pixels, "factor": ours.side_multiple}
    if name == "paddleocr_vl":
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

        found: tuple[int, int] = smart_resize(height, width, **bounds)
        return found
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as of_frames

    found = of_frames(2, height, width, **bounds)
    return found


@pytest.mark.parametrize(("name", "default"), FAMILIES)
@settings(max_examples=examples(15), deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_pixels_equal_transformers(name: str, default: ImageSettings, width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        height = width
    ours = replace(default, min_pixels=56 * 56, max_pixels=140 * 140)
    image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
    theirs = processor_of(name, size={"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels})([image])
    prepared = prepare_image(image, ours)
    _, rows, columns = prepared.grid_thw
    assert theirs["image_grid_thw"][0].tolist() == [1, rows, columns]
    values = (prepared.pixels_HWC * ours.rescale_factor - np.array(ours.image_mean)) / np.array(ours.image_std)
    patch, merge = ours.patch_size, ours.merge_size
    if name == "paddleocr_vl":  # row after row, one frame
        shown = np.asarray(theirs["pixel_values"]).reshape(rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    else:
        blocks = (rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
        shown = np.asarray(theirs["pixel_values"]).reshape(blocks)[:, :, :, :, :, 1].transpose(0, 2, 5, 1, 3, 6, 4)
    np.testing.assert_allclose(values, shown.reshape(values.shape), atol=1e-6, rtol=0)


def test_the_users_bounds_are_an_images_whatever_the_file_counts(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = {"vision_config": VISION}
    for default in (ImageSettings(), PADDLE, GLM):
        ours = read_image_settings(tmp_path, config, default=default, min_pixels=100 * 784, max_pixels=101 * 784)
        assert ours.num_tokens(*ours.fit(9000, 9000)) == 100
        assert ours.num_tokens(*ours.fit(30, 30)) == 100
    with pytest.raises(ConfigError, match="image_min_pixels 6272 is more than image_max_pixels 1000 "):
        read_image_settings(tmp_path, config, default=GLM, max_pixels=1000)


def test_low_detail_is_an_images_too() -> None:
    low = replace(GLM, max_pixels=1 << 24).with_low_detail()
    assert 0.9 * 512 * 512 < np.prod(low.fit(5000, 5000)) <= 512 * 512


def test_a_tower_of_one_frame_takes_no_pairs(tmp_path: Path) -> None:
    """The published config.json of PaddleOCR-VL has a temporal_patch_size of 2, which nothing reads."""
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"temporal_patch_size": 1}))
    config = {"vision_config": VISION}
    assert read_image_settings(tmp_path, config, default=PADDLE).temporal_patch_size == 1
    with pytest.raises(ModelError, match=r"temporal_patch_size is 1 in preprocessor_config\.json but"):
        read_image_settings(tmp_path, config, default=GLM)
    file.write_text(json.dumps({"temporal_patch_size": 2}))
    with pytest.raises(ModelError, match="temporal_patch_size is 2; this family's tower takes one frame"):
        read_image_settings(tmp_path, config, default=PADDLE)


def test_another_rule_is_another_setting() -> None:
    """So a job does not go on with it, and what is cached by the settings is not shared."""
    rules = [replace(GLM, resizing=rule) for rule in Resizing]
    assert len({one.digest() for one in rules}) == len({json.dumps(one.to_json()) for one in rules}) == len(rules)
