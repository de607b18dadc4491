"""A prefill's last layer makes the last token of each row alone, unless more is read; answers are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM
from npu_runner.core.batch import ScheduledBatch
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.platforms import pick_platform
from npu_runner.request.prompt_inputs import PromptInputs
from tests.full_set import only_full
from tests.oracle.family_prompts import prompts_of
from tests.oracle.running import SMALL, assert_equals_reference, greedy, runner_of
from tests.oracle.tiled_attention import TiledAttention

EAGER: dict[str, Any] = {**SMALL, "graph_mode": "eager"}
CHUNK = 64


@contextmanager
def seen_prefills(llm: LLM) -> Iterator[list[tuple[int, int, list[int]]]]:
    """(tokens, sequences, rows that each layer's MLP has taken) of every prefill inside."""
    found: list[tuple[int, int, list[int]]] = []
    steps: Any = runner_of(llm).steps
    submit = steps.submit
    rows: list[int] = []
    hooks = [layer.mlp.register_forward_pre_hook(lambda _, taken: rows.append(len(taken[0])))
             for layer in steps.model.decoder.layers]

    def watched(batch: ScheduledBatch) -> Any:
        rows.clear()
        step = submit(batch)
        if batch.is_prefill:
            found.append((batch.num_tokens, batch.batch_size, list(rows)))
        return step

    steps.submit = watched
    try:
        yield found
    finally:
        del steps.submit
        for hook in hooks:
            hook.remove()


def prompts(*lengths: int) -> list[PromptInputs]:
    return [PromptInputs([(7 * place + length) % 290 for place in range(length)]) for length in lengths]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", *only_full(
    "layers with other norms: that their answers are right is in the fast set", "olmo2", "glm4v")])
def test_only_last_tokens_go_through_the_last_layer(model_type: str, checkpoint: Any, platform_name: str) -> None:
    """Of whole prompts and of chunks, whatever else is in the step."""
    with LLM(checkpoint(model_type), platform=platform_name, max_num_batched_tokens=CHUNK, **EAGER) as llm:
        with seen_prefills(llm) as steps:
            llm.generate(prompts(100, 5, 9, 1, 30), greedy(2))
        assert any(num_rows > 1 for _, num_rows, _ in steps)
        assert any(num_tokens == CHUNK for num_tokens, _, _ in steps)
        for num_tokens, num_rows, (*before, last) in steps:
            assert set(before) == {num_tokens}
            assert last == num_rows


def test_all_tokens_where_probabilities_of_a_prompt_are_asked_for(checkpoint: Any, platform_name: str) -> None:
    with LLM(checkpoint("qwen3"), platform=platform_name, **EAGER) as llm, seen_prefills(llm) as steps:
        llm.generate(prompts(20), replace(greedy(1), prompt_logprobs=0))
        llm.generate(prompts(21), greedy(1))
    assert [rows[-1] for _, _, rows in steps] == [20, 1]


@pytest.mark.parametrize(("model_type", "changes"), [
    ("qwen3_5_text", {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}),
    ("qwen3_vl", {"num_hidden_layers": 2, "vision": {"deepstack_visual_indexes": [0, 2]}}),
    ("qwen3", {"num_hidden_layers": 1}),
], ids=["a state in the last layer", "deepstack behind the last layer", "one layer"])
def test_last_layers_of_every_kind_equal_transformers(model_type: str, changes: dict[str, Any], checkpoint: Any,
                                                      platform_name: str) -> None:
    path: Path = checkpoint(model_type, **changes)
    with LLM(path, platform=platform_name, max_num_batched_tokens=CHUNK, **EAGER) as llm:
        assert_equals_reference(path, llm, *prompts_of(llm, model_type, of_variant=True))


def test_sums_of_other_rows_are_refused() -> None:
    """A layer that takes its residual of all rows would be broadcast without a word where a step has one sequence."""
    cpu = pick_platform("cpu")
    attention = TiledAttention(block_size=4, bytes_per_token=16)
    context = LayerContext(cpu.make_ops(), attention, TensorParallel(0, 1), torch.float32, torch.device("cpu"), None)
    norm = RMSNorm(8, 1e-6, context)
    with pytest.raises(AssertionError, match=r"\(1, 8\) and \(5, 8\)"):
        norm.add_forward(torch.zeros(1, 8), torch.zeros(5, 8))
