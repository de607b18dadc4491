"""Draws tokens with every sampling parameter on the npu platform and writes them, as JSON, on the last line, with what
of masks the emulation has run on the AI CPU, and launched for one step's.

    python -m tests.npu.programs.sampling [--count]
    python -m tests.npu.programs.sampling --wide [--count]     # 16 rows of a vocabulary of 151,936
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from npu_runner.grammars.compile import with_grammar
from npu_runner.grammars.matchers import Matchers
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.token_constraints import ConstrainedRows
from tests.oracle.tiny_checkpoints import write_tokenizer
from tests.runner.sampler_steps import SEVERAL, VOCAB, Conversation, conversation, make_sampler, spell

NUM_STEPS = 8
_RULED_VOCAB = 333


PLAIN = [SamplingParams(temperature=temperature, seed=number)
         for number, temperature in enumerate((0.3, 0.7, 1.0, 1.0, 1.6, 3.0))]


RULED = [SamplingParams(temperature=0.0, structured_outputs={"regex": "[a-z]{40}"}), SamplingParams(temperature=1.0),
         SamplingParams(temperature=1.0, structured_outputs={"json_object": True}, repetition_penalty=1.3, top_k=9),
         SamplingParams(temperature=0.0), SamplingParams(temperature=1.5, structured_outputs={"choice": ["circle"]})]


_WIDE_VOCAB = 151_936
WIDE = [SamplingParams(repetition_penalty=1.3), SamplingParams(frequency_penalty=0.7, temperature=0.0),
        SamplingParams(logit_bias={3: 2.0, 151_900: 30.0}), SamplingParams(min_tokens=3),
        SamplingParams(bad_words=["a", "bc"]), SamplingParams(min_p=0.05), SamplingParams(top_p=0.8),
        SamplingParams(top_k=9, repetition_penalty=1.1, no_repeat_ngram_size=2)] * 2


def draw(device: torch.device, softmax_sampler: Any = None) -> list[list[int]]:
    """The tokens of all of SEVERAL together, then of rows that only draw, which a platform may do at once, then of
    rows with grammars and without."""
    everyone = [conversation(number) for number in range(len(SEVERAL))]
    plain = [Conversation(params, [number + 3, 7], number) for number, params in enumerate(PLAIN)]
    return [tokens for batch in (everyone, plain) for tokens in draw_together(batch, device, softmax_sampler)
            ] + draw_ruled(device, softmax_sampler)


def draw_wide(device: torch.device, **hooks: Any) -> list[list[int]]:
    """Tokens of rows that change their logits one by one, by counts, biases and bans, and of rows that draw."""
    table_RV = torch.randn(4, _WIDE_VOCAB, generator=torch.Generator().manual_seed(7)) * 2
    sampler = make_sampler(_WIDE_VOCAB, len(WIDE), spell, device, **hooks)
    slots, tokens = np.arange(len(WIDE), dtype=np.int32), [[] for _ in WIDE]
    for slot, params in enumerate(WIDE):
        sampler.add(slot, params, [slot, 7, 7], seed=slot)
    for number in range(4):
        arrays = torch.from_numpy(slots), torch.from_numpy(sampler.host_inputs(slots)), torch.zeros(len(slots)).int()
        logits_BV = table_RV[number].expand(len(slots), -1).contiguous()
        drawn = sampler(logits_BV.to(device), *(array.to(device) for array in arrays), slots).to_host()
        for one, token in zip(tokens, drawn.token_ids_B.tolist(), strict=True):
            one.append(token)
    return tokens


def draw_ruled(device: torch.device, softmax_sampler: Any, **hooks: Any) -> list[list[int]]:
    """A vocabulary that is no multiple of 32; a row with a grammar alone, then beside others."""
    with tempfile.TemporaryDirectory() as folder:
        eos = write_tokenizer(Path(folder))["<|im_end|>"]
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    found = []
    for number in (1, len(RULED)):
        constrained = ConstrainedRows(Matchers(tokenizer, _RULED_VOCAB, [eos]), None, [eos])
        ruled = [Conversation(_resolved(params), [row + 3, 7], row) for row, params in enumerate(RULED[:number])]
        found += draw_together(ruled, device, softmax_sampler, _RULED_VOCAB, constrained=constrained, **hooks)
    return found


def _resolved(params: SamplingParams) -> SamplingParams:
    rule = params.structured_outputs
    return params.replace(structured_outputs=with_grammar(rule)) if rule else params


def draw_together(everyone: list[Conversation], device: torch.device, softmax_sampler: Any,
                  vocab_size: int = VOCAB, **settings: Any) -> list[list[int]]:
    table_VV = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(11)) * 2
    sampler = make_sampler(vocab_size, len(everyone), spell, device, softmax_sampler, **settings)
    slots = np.arange(len(everyone), dtype=np.int32)
    for slot, one in enumerate(everyone):
        sampler.add(slot, one.params, one.prompt, seed=one.seed)
    for number in range(NUM_STEPS):
        logits_BV = torch.stack([one.logits(table_VV) for one in everyone])
        arrays = (torch.from_numpy(slots), torch.from_numpy(sampler.host_inputs(slots)),
                  torch.full((len(slots),), number, dtype=torch.int32))
        host = sampler(logits_BV.to(device), *(array.to(device) for array in arrays), slots).to_host()
        assert host.receipts_B.tolist() == [number] * len(slots)
        for one, token in zip(everyone, host.token_ids_B.tolist(), strict=True):
            one.output.append(token)
    return [one.output for one in everyone]


def wide(device: torch.device, ops: Any) -> dict[str, Any]:
    tokens = draw_wide(device, add_at=ops.add_at)
    if "--count" not in sys.argv:
        return {"tokens": tokens}
    from tests.cann.programs.emulation import fallbacks, reset_counters

    reset_counters()
    draw_wide(device, add_at=ops.add_at)
    return {"tokens": tokens, "fallbacks": fallbacks()}


def main() -> None:
    from npu_runner.platforms import pick_platform

    platform = pick_platform("npu")
    platform.devices.prepare_process(0, 1)
    device, softmax_sampler = platform.devices.set_device(0), platform.make_ops().softmax_sampler(greedy=False)
    if "--wide" in sys.argv:
        print(json.dumps(wide(device, platform.make_ops())))
        return
    tokens = draw(device, softmax_sampler)
    on_ai_cpu: dict[str, int] = {}
    launches: dict[str, int] = {}
    if "--count" in sys.argv:  # only the emulation can
        from tests.cann.programs.emulation import calls, reset_counters

        reset_counters()
        draw_ruled(device, softmax_sampler)
        on_ai_cpu = calls("ai_cpu")
        logits_BV, words_BW = (torch.zeros(size, dtype=dtype, device=device) for size, dtype in (
            ((4, 320), torch.bfloat16), ((4, 10), torch.int32)))
        ops = platform.make_ops()
        ops.allow_tokens(logits_BV, None, words_BW)
        reset_counters()
        ops.allow_tokens(logits_BV, None, words_BW)
        launches = calls("launches")
    print(json.dumps({"tokens": tokens, "masks_on_ai_cpu": on_ai_cpu, "mask_launches": launches}))


if __name__ == "__main__":
    main()
