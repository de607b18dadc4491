"""M-RoPE positions equal transformers' get_rope_index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.vision_prompts import asks_for_mrope, mrope_positions
from npu_runner.request.prompt_inputs import ImageSpan
from tests.full_set import examples

MERGE = 2


@pytest.fixture(scope="module")
def hf_model(qwen_folder: Path) -> Any:
    import torch
    from transformers import AutoConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    with torch.device("meta"):
        return Qwen3VLModel(AutoConfig.from_pretrained(qwen_folder))


def hf_positions(hf_model: Any, num_tokens: int, spans: list[ImageSpan], grids: list[tuple[int, int, int]]) -> Any:
    import torch

    kinds = torch.zeros(1, num_tokens, dtype=torch.int)
    for span in spans:
        kinds[0, span.start : span.start + span.num_tokens] = 1
    ids = torch.zeros(1, num_tokens, dtype=torch.long)
    return hf_model.get_rope_index(ids, kinds, image_grid_thw=torch.tensor(grids) if grids else None)


GRIDS = st.tuples(st.just(1), st.integers(1, 9).map(lambda n: n * MERGE), st.integers(1, 9).map(lambda n: n * MERGE))
# Text before each image and after the last. Two markers at least stand between images: transformers takes
# touching images for one.
LAYOUT = st.lists(st.tuples(st.integers(0, 12), GRIDS), max_size=4)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=LAYOUT, tail=st.integers(0, 12))
def test_positions_equal_transformers(layout: list[tuple[int, tuple[int, int, int]]], tail: int, hf_model: Any) -> None:
    spans, num_tokens = [], 0
    for number, (num_text, (_, height, width)) in enumerate(layout):
        num_tokens += num_text + (2 if number else 0)
        spans.append(ImageSpan(num_tokens, height * width // MERGE**2, number))
        num_tokens += spans[-1].num_tokens
    num_tokens += tail if spans else tail + 1
    grids = [grid for _, grid in layout]
    ours, delta = mrope_positions(num_tokens, spans, grids, MERGE)
    theirs, their_delta = hf_positions(hf_model, num_tokens, spans, grids)
    assert ours.dtype == np.int32
    np.testing.assert_array_equal(ours, theirs[:, 0].numpy())
    assert delta == their_delta.item()


def test_touching_images_follow_each_other() -> None:
    spans = [ImageSpan(0, 6, 0), ImageSpan(6, 2, 1)]
    positions_3T, delta = mrope_positions(9, spans, [(1, 4, 6), (1, 2, 4)], MERGE)
    assert positions_3T.tolist() == [
        [0, 0, 0, 0, 0, 0, 3, 3, 5],
        [0, 0, 0, 1, 1, 1, 3, 3, 5],
        [0, 1, 2, 0, 1, 2, 3, 4, 5],
    ]
    assert delta == 6 - 9


def test_text_only_prompts_of_an_mrope_model_count_up(qwen: ChatProcessor) -> None:
    prompt = qwen([{"role": "user", "content": "hello"}])
    assert prompt.positions_3T is not None
    assert prompt.positions_3T.tolist() == [list(range(len(prompt.token_ids)))] * 3
    assert prompt.position_delta == 0


def test_models_without_mrope_have_no_positions(llama: ChatProcessor) -> None:
    prompt = llama([{"role": "user", "content": "hello"}])
    assert prompt.positions_3T is None
    assert prompt.position_delta == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, True),
        ({"model_type": "x", "text_config": {"rope_parameters": {"mrope_section": [1, 1, 1]}}}, True),
        ({"model_type": "qwen3", "rope_scaling": None}, False),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, False),
        ({}, False),
    ],
)
def test_which_checkpoints_use_mrope(config: dict[str, Any], expected: bool) -> None:
    assert asks_for_mrope(config) is expected
