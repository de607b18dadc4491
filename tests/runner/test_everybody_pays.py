"""What one row asks for is done for that row alone, and its log probabilities are kept as numbers."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_runner import LLM, SamplingParams
from tests.oracle.running import SMALL
from tests.runner.sampler_steps import make_sampler, step, tensors_in

VOCAB, ROWS = 2048, 32
LOGITS_BV = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
LIKED = chr(int(LOGITS_BV[0].argmax()))  # what the first row generates, step by step


PICKING = {"index_select", "gather"}
"""They read of their input no more than they give."""
WRITING = {"index_add_", "scatter_add_"}
"""They touch a few places of a large table."""


def copies_its_table(name: str, args: Any) -> bool:
    """A scatter along more than a row: a flat table is one long axis, and Ascend's AI CPU copies it out and back."""
    return name == "scatter_add_" and args[0].shape[args[1]] > VOCAB


class ElementCount(TorchDispatchMode):
    """Elements that operators read, make or overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in WRITING and not copies_its_table(name, args):
            self.total += args[2].numel()
        else:
            given, made = tensors_in(args), tensors_in([result])
            places = {one.untyped_storage().data_ptr() for one in given}
            if func.is_view and all(one.untyped_storage().data_ptr() in places for one in made):
                return result  # `to` is called a view, too, and may be a copy
            read = 0 if name in PICKING else max((one.numel() for one in given), default=0)
            self.total += max(read, sum(one.numel() for one in made))
        return result


def elements(asked: dict[str, Any], num_asking: int) -> int:
    """Of a step of ROWS sequences, of which some ask."""
    sampler = make_sampler(VOCAB, ROWS, lambda text: [ord(letter) for letter in text])
    for slot in range(ROWS):
        own = asked if slot < num_asking else {}
        sampler.add(slot, SamplingParams(**{"temperature": 0.0, **own}), [1, 2], seed=slot)
    for _ in range(2):
        step(sampler, LOGITS_BV, range(ROWS)).to_host()
    with ElementCount() as count:
        step(sampler, LOGITS_BV, range(ROWS)).to_host()
    return count.total


@pytest.mark.parametrize("asked", [
    {"repetition_penalty": 1.2}, {"frequency_penalty": 0.3}, {"logit_bias": {4: 1.0}}, {"min_tokens": 50},
    {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_k": 9}, {"logprobs": 5},
    {"bad_words": [f"{LIKED}{chr(b)}" for b in range(400, 656) if chr(b) != LIKED]},
], ids=lambda asked: "-".join(asked))  # fmt: skip
def test_a_row_that_asks_costs_no_pass_over_its_neighbours(asked: dict[str, Any]) -> None:
    more = elements(asked, 1) - elements({}, 0)
    assert more < ROWS * VOCAB / 2, "less than half a pass over the step's logits"


def test_log_probabilities_take_the_bytes_of_their_numbers(checkpoint: Any) -> None:
    folder: Path = checkpoint("qwen3")
    with LLM(folder, platform="cpu", **SMALL) as llm:
        params = SamplingParams(max_tokens=150, ignore_eos=True, n=8, logprobs=20, seed=1)
        llm.generate(["which"], params.replace(max_tokens=4))  # what is made once
        llm.engine.add_request("row", llm.engine.processor.from_text("which"), params)
        for _ in range(20):
            llm.engine.step()
        tracemalloc.start()
        for _ in range(80):
            llm.engine.step()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert taken / (8 * 80) < 400, "168 bytes of numbers, and what else a token leaves"
