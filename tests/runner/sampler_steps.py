"""Drives a Sampler on the CPU the way the model runner does. Shared by the sampler's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_runner.prompts.text.tokenizer import resolve_sampling
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.sampler import Sampler, SamplerOutput

VOCAB = 300
SEVERAL = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.7, temperature=1.2),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.7, presence_penalty=0.3, top_k=50),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, min_tokens=6, stop_token_ids=[5]),
    SamplingParams(bad_words=["ab", "cde"], logit_bias={token: 3.0 for token in range(10, 16)}),
    SamplingParams(min_tokens=15, logprobs=2),
    SamplingParams(temperature=0.0, no_repeat_ngram_size=2, no_repeat_ngram_exempt_ids=[0, 250]),
    SamplingParams(temperature=0.5, no_repeat_ngram_size=3, no_repeat_ngram_window=9, presence_penalty=-2.0),
]
EOS = 2


class SpellingSampler(Sampler):
    """Takes bad words as text, which the engine turns into token ids before it queues a request."""

    spell: Callable[[str], list[int]] | None = None

    def add(self, slot: int, params: SamplingParams, *arguments: Any, **seed: Any) -> None:
        super().add(slot, resolve_sampling(params, self.spell, None) if self.spell else params, *arguments, **seed)


def make_sampler(vocab_size: int, max_num_seqs: int = 8, encode: Callable[[str], list[int]] | None = None,
                 device: str | torch.device = "cpu", softmax_sampler: Any = None,
                 **settings: Any) -> SpellingSampler:
    sampler = SpellingSampler(vocab_size=vocab_size, max_num_seqs=max_num_seqs, eos_token_ids=[EOS],
                              device=torch.device(device), softmax_sampler=softmax_sampler, **settings)
    sampler.spell = encode
    return sampler


def step(sampler: Sampler, logits_BV: Tensor, slots: Sequence[int],
         uniforms: Sequence[float] | None = None, receipt: int = 0) -> SamplerOutput:
    """One step of the sequences in `slots`, with the sampler's own uniforms unless others are given."""
    host_slots = np.asarray(slots, dtype=np.int32)
    uniforms_B = sampler.host_inputs(host_slots) if uniforms is None else np.asarray(uniforms, dtype=np.float32)
    assert uniforms_B.dtype == np.float32
    receipts_B = torch.full((len(slots),), receipt, dtype=torch.int32)
    return sampler(logits_BV, torch.from_numpy(host_slots), torch.from_numpy(uniforms_B), receipts_B, host_slots)


def sample_one(params: SamplingParams, logits_V: Tensor, *, prompt: Sequence[int] = (), output: Sequence[int] = (),
               seed: int = 0, encode: Callable[[str], list[int]] | None = None) -> int:
    """The token that follows `output`, alone in a fresh sampler."""
    sampler = make_sampler(len(logits_V), encode=encode)
    sampler.add(0, params, prompt, output, seed=seed)
    return int(step(sampler, logits_V[None], [0]).token_ids_B)


def draw_many(params: SamplingParams, logits_V: Tensor, *, num_seqs: int = 500, num_steps: int = 40) -> np.ndarray:
    """Counts by token of num_seqs * num_steps draws from the same logits."""
    sampler = make_sampler(len(logits_V), num_seqs)
    for slot in range(num_seqs):
        sampler.add(slot, params, [0], seed=slot)
    logits_BV = logits_V.expand(num_seqs, -1)
    tokens = [step(sampler, logits_BV, range(num_seqs)).token_ids_B for _ in range(num_steps)]
    return torch.bincount(torch.cat(tokens), minlength=len(logits_V)).numpy()


def tokens_over_unit_interval(params: SamplingParams, logits_V: Tensor, num_rows: int = 1024) -> np.ndarray:
    """The token at each of `num_rows` evenly spaced uniforms, the ends included: the whole support, in CDF order."""
    sampler = make_sampler(len(logits_V), num_rows)
    for slot in range(num_rows):
        sampler.add(slot, params, [0], seed=0)
    uniforms = np.linspace(0.0, 1.0 - 2.0**-24, num_rows)
    return step(sampler, logits_V.expand(num_rows, -1), range(num_rows), uniforms).token_ids_B.numpy()


@dataclass
class Conversation:
    """One sequence whose logits follow from a fixed table and its last token, as those of a language model would."""

    params: SamplingParams
    prompt: list[int]
    seed: int
    output: list[int] = field(default_factory=list)

    def logits(self, table_VV: Tensor) -> Tensor:
        last = (self.prompt + self.output)[-1]
        return table_VV[last] + 0.1 * len(self.output)


def run_together(sampler: Sampler, table_VV: Tensor, at_slots: Mapping[int, Conversation], num_steps: int) -> None:
    """Generate `num_steps` tokens for registered conversations, all in one batch per step."""
    slots = list(at_slots)
    for _ in range(num_steps):
        logits_BV = torch.stack([at_slots[slot].logits(table_VV) for slot in slots])
        for slot, token in zip(slots, step(sampler, logits_BV, slots).token_ids_B.tolist(), strict=True):
            assert token >= 0
            at_slots[slot].output.append(token)


def generate(table_VV: Tensor, conversation: Conversation, num_steps: int, *, slot: int = 0,
             encode: Callable[[str], list[int]] | None = None) -> list[int]:
    """The conversation's tokens when it runs alone."""
    sampler = make_sampler(len(table_VV), slot + 1, encode)
    sampler.add(slot, conversation.params, conversation.prompt, seed=conversation.seed)
    run_together(sampler, table_VV, {slot: conversation}, num_steps)
    return conversation.output


class MemoryRunsOut(TorchDispatchMode):
    """The `at`-th operator that takes memory fails."""

    def __init__(self, at: int):
        super().__init__()
        self.num_left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Inside inference mode `to` arrives whole: a view or a copy, as it happens.
        if not func._schema.is_mutable and not storages(result) & storages(args):
            self.num_left -= 1
            if self.num_left == 0:
                raise MemoryError
        return result


def storages(values: Any) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in tree_leaves(values) if isinstance(value, Tensor)}


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def spell(text: str) -> list[int]:
    """A token per letter; 'a' is 10, a space is 9."""
    return [9 if letter == " " else ord(letter) - ord("a") + 10 for letter in text]


def conversation(number: int) -> Conversation:
    return Conversation(SEVERAL[number % len(SEVERAL)], [number + 20, 7, 7, 200], seed=1000 + number)
