"""Masks in the sampler: how many passes over a step's logits they take, and that what is no number is still seen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from npu_runner import LLM
from npu_runner.assets import SHAPES_VL
from npu_runner.grammars import matchers as matchers_module
from npu_runner.grammars.compile import with_grammar
from npu_runner.grammars.matchers import Matchers
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import StructuredOutputsParams
from npu_runner.sampling.sampler import ALL_BANNED, NO_TOKEN
from npu_runner.sampling.token_constraints import ConstrainedRows
from tests.oracle.tiny_checkpoints import write_tokenizer
from tests.runner.sampler_steps import SpellingSampler, make_sampler, step, tensors_in

VOCAB, ROWS = 333, 12  # no multiple of 32
LOGITS_BV = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


class Passes(TorchDispatchMode):
    """Names of operators that read, make or overwrite as much as the logits of the whole step."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        places = {one.untyped_storage().data_ptr() for one in tensors_in(args)}
        is_view = func.is_view and all(one.untyped_storage().data_ptr() in places for one in tensors_in([result]))
        if not is_view and max((one.numel() for one in tensors_in([args, result])), default=0) >= ROWS * VOCAB:
            self.names.append(func.overloadpacket.__name__)
        return result


def bits_of(mask_W: np.ndarray, tokens: list[int]) -> list[int]:
    return [int(mask_W.view(np.uint32)[token // 32]) >> token % 32 & 1 for token in tokens]


@pytest.mark.parametrize("takes_several", [True, False], ids=["as installed", "as before llguidance 1.7"])
def test_an_answer_may_end_with_any_end_token_where_its_rule_ends(
    takes_several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one mask word and of others, whichever is named first. The rule may end after one letter, two or
    three: no other bit changes with the number of end tokens."""
    if not takes_several:
        monkeypatch.setattr(matchers_module, "_accepts_several_ends", lambda: False)
    ends = [write_tokenizer(tmp_path)["<|im_end|>"], 301, 3, 40]
    tokenizer = Tokenizer.from_file(f"{tmp_path}/tokenizer.json")
    letter, grammar = tokenizer.encode("a").ids[0], 'start: "a" "a"? "a"?'
    masks: dict[int, list[np.ndarray]] = {}
    for listed in (ends[:1], ends[::-1], ends):
        matchers = Matchers(tokenizer, VOCAB, listed)
        matcher = matchers.prepare(grammar).copy()
        masks[len(listed)] = []
        for num_said in range(4):
            masks_2W = np.zeros((2, matchers.num_words), dtype=np.int32)
            matchers.fill([(matcher, 1)], masks_2W)
            assert not masks_2W[0].any(), "the mask of another row"
            assert bits_of(masks_2W[1], listed) == [num_said > 0] * len(listed)
            masks[len(listed)].append(masks_2W[1])
            assert matcher.consume_token(letter) == (num_said < 3)
        matchers.close()
    for num_said, (one_W, several_W) in enumerate(zip(*masks.values(), strict=True)):
        for token in ends if num_said else []:
            one_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        np.testing.assert_array_equal(one_W, several_W)


def test_a_checkpoint_with_two_end_tokens_ends_with_either(tmp_path: Path) -> None:
    """1 s: loads a model."""
    path = shutil.copytree(SHAPES_VL, tmp_path / "model")
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with LLM(path, platform="cpu", max_num_seqs=2, max_model_len=128, kv_cache_bytes=16 << 20,
             preprocessing_workers=0) as llm:
        for end in ends:
            (answer,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100.0},
                                                           structured_outputs={"regex": "[0-9]{3,5}"}))
            assert (answer.token_ids[-1], answer.finish_reason) == (end, "stop")
            assert re.fullmatch("[0-9]{3}", answer.text), "as soon as the rule lets it end"


@pytest.fixture
def constrained(tmp_path: Path) -> ConstrainedRows:
    eos = write_tokenizer(tmp_path)["<|im_end|>"]
    return ConstrainedRows(Matchers(Tokenizer.from_file(f"{tmp_path}/tokenizer.json"), VOCAB, [eos]), None, [eos])


def with_rule(**others: Any) -> SamplingParams:
    rule = with_grammar(StructuredOutputsParams(regex="[a-z]{40}"))
    return SamplingParams(structured_outputs=rule, **{"temperature": 0.0, **others})


def sampler_of(constrained: ConstrainedRows, several: list[SamplingParams]) -> SpellingSampler:
    sampler = make_sampler(VOCAB, ROWS, constrained=constrained)
    for slot, params in enumerate(several):
        sampler.add(slot, params, [1, 2], seed=slot)
    return sampler


def passes(constrained: ConstrainedRows, several: list[SamplingParams]) -> list[str]:
    """Of the second step."""
    sampler = sampler_of(constrained, several)
    step(sampler, LOGITS_BV, range(len(several))).to_host()
    with Passes() as counted:
        step(sampler, LOGITS_BV, range(len(several))).to_host()
    return counted.names


def test_masks_of_all_rows_take_a_look_up_and_a_sum(constrained: ConstrainedRows) -> None:
    """No copy of the logits, and none is looked through twice."""
    assert passes(constrained, [with_rule()] * ROWS) == ["index_select", "add", "max", "sum"]
    assert passes(constrained, [SamplingParams(temperature=0.0)] * ROWS) == ["max", "sum"]


def test_masks_of_some_rows_take_no_pass_over_the_others(constrained: ConstrainedRows) -> None:
    few = passes(constrained, [with_rule(), *[SamplingParams(temperature=0.0)] * (ROWS - 1)])
    assert few == ["index_select", "max", "sum"], "the first one takes its row out"


@pytest.mark.parametrize("others", [0, 3], ids=["all", "some"])
@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0}, {"top_k": 5, "temperature": 1.0},
                                   {"repetition_penalty": 1.2}], ids=lambda asked: "-".join(asked) or "greedy")
def test_a_row_that_is_no_number_says_so_whatever_hides_it(constrained: ConstrainedRows, asked: dict[str, Any],
                                                           others: int) -> None:
    """NaN and +inf where a mask has a bit and where it has none; and a row of which a mask leaves nothing."""
    logits_BV = LOGITS_BV[: 6 + others].clone()
    allowed = step(sampler_of(constrained, [with_rule()]), logits_BV[:1], [0]).token_ids_B.item()
    hidden = VOCAB - 1
    logits_BV[0, hidden], logits_BV[1, hidden], logits_BV[2, allowed] = torch.nan, torch.inf, torch.nan
    logits_BV[3], logits_BV[4, allowed] = -torch.inf, torch.inf
    logits_BV[3, hidden] = 1.0
    sampler = sampler_of(constrained, [with_rule(**asked)] * 6 + [SamplingParams()] * others)
    tokens = np.array(step(sampler, logits_BV, range(6 + others)).to_host().token_ids_B)
    assert tokens[:5].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, ALL_BANNED, NO_TOKEN]
    assert (tokens[5:] >= 0).all()
