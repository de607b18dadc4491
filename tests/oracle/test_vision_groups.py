"""Where a backend wants fewer patches at once, the tower takes images in groups, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from npu_runner import LLM
from npu_runner.runner.model_runner import ModelRunner
from tests.oracle.reference import random_image
from tests.oracle.running import SMALL, runner_of

SIZES = ((64, 64), (128, 96), (64, 64), (224, 160), (32, 96), (128, 96))


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_vl", "qwen2_5_vl"])
def runner(request: pytest.FixtureRequest, checkpoint: Any) -> Iterator[ModelRunner]:
    with LLM(checkpoint(request.param), platform="cpu", **SMALL) as llm:
        yield runner_of(llm)


def images_of(runner: ModelRunner) -> list[Any]:
    rng = np.random.default_rng(0)
    drawn = [random_image(rng, *size) for size in SIZES]
    content = [*({"type": "image", "image": each} for each in drawn), {"type": "text", "text": "which"}]
    images: list[Any] = runner.checkpoint.processor([{"role": "user", "content": content}]).images
    return images


def num_patches(image: Any) -> int:
    return int(np.prod(image.grid_thw))


@pytest.mark.parametrize("most", [1, 60, 100, None])
def test_groups_give_what_each_image_alone_gives(runner: ModelRunner, most: int | None,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(runner)
    tower: Any = runner.model.visual
    monkeypatch.setattr(type(tower.attention), "vision_patches", most)
    calls: list[list[int]] = []
    tower.register_forward_pre_hook(
        lambda _, args: calls.append([height * width for height, width in args[1]]), prepend=True)
    with torch.inference_mode():
        together = runner.strategy.encode_images(runner.model, images)
        num_calls = len(calls)
        alone = [runner.strategy.encode_images(runner.model, [image])[0] for image in images]
    tower._forward_pre_hooks.clear()
    for found, expected in zip(together, alone, strict=True):
        for x, y in zip((found.main_MD, *found.deepstack), (expected.main_MD, *expected.deepstack), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    groups = calls[:num_calls]
    assert sorted(chain.from_iterable(groups)) == sorted(map(num_patches, images))
    if most is None:
        assert len(groups) == 1
    else:
        assert all(len(group) == 1 or sum(group) <= most for group in groups)
        assert all(sum(group) + following[0] > most for group, following in pairwise(groups))
