"""Compares a network of transformers as it is served with the same network under transformers' own attention and masks.

A start does this once, before the KV cache is measured. Knows no family and imports nothing of transformers.

T tokens of the prompt, N query heads, H head dim, V vocabulary, NB blocks of S tokens, K kv heads. A distance is
between G groups of R rows of X numbers. C tokens stand in both runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from npu_runner.errors import ModelError
from npu_runner.layers.attention import PagedAttention, make_kv_cache, resolve_windows
from npu_runner.models.transformers_fusion import Fusion
from npu_runner.models.transformers_model import AttentionPort, TransformersModel, check_call
from npu_runner.platforms.step_inputs import AttentionMetadata

logger = logging.getLogger(__name__)

NUM_TOKENS = 65


@dataclass(frozen=True, kw_only=True)
class Distances:
    """The largest distance of a row, relative to the RMS of all rows. docs/generic.md has those of 61 families."""

    attention: float
    """A row is one head of one token. The query, key and value are the same on both sides."""
    others: float
    """A row is one head of a token's query, key or value, or the token's logits."""


FLOAT32_BOUNDS = Distances(attention=1e-4, others=1e-3)
# Rounding may choose another expert for a token, which changes all that follows in its row.
HALF_BOUNDS = Distances(attention=0.05, others=0.25)


@dataclass(kw_only=True)
class Comparison:
    """The prompt's first run, under transformers' own attention. Each attention call is computed twice, by its function
    and by ours over a small cache; the network goes on with the first."""

    steps: list[tuple[slice, AttentionMetadata]]
    bound: float
    calls: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Query, key, value and output of each layer, (1, T, heads, H)."""
    worst: float = 0.0

    def attend(self, port: AttentionPort, own: Callable[..., Any], module: nn.Module, qkv: Sequence[Tensor],
               mask: Tensor | None, scaling: float | None, more: dict[str, Any]) -> tuple[Tensor, None]:
        """The output of `own`, transformers' function, in float32. Raises ModelError where ours is another."""
        check_call(port.call.name, None, dict(more))
        expected = own(module, *(x.float() for x in qkv), None if mask is None else mask.float(),
                       scaling=port.call.scale if scaling is None else scaling, **more)[0]
        q, k, v = (x.transpose(1, 2).contiguous() for x in qkv)
        found_TNH = torch.cat([port.paged(q[0, rows], k[0, rows], v[0, rows], metadata)
                               for rows, metadata in self.steps])
        error = distance_of_worst_row(found_TNH.transpose(0, 1), expected[0].transpose(0, 1))
        if not error <= self.bound:
            raise ModelError(f"{port.call.name}: attention differs from transformers' own by {error:.1%} for the same "
                             f"query, key and value, and {self.bound:.1%} is allowed (a mask of its own, or an "
                             "operator of this platform that is wrong); such a model needs a strategy of its own")
        self.worst = max(self.worst, error)
        output = expected.to(q.dtype)
        self.calls[port.paged.layer_index] = (q, k, v, output)
        return output, None


@dataclass(kw_only=True)
class Replay:
    """The second run, as it is served: tokens lie in another order, and some are others at any position. Attention
    returns the outputs of the first run."""

    first: Comparison
    compared_C: Tensor
    """Places of the tokens that both runs have."""
    bound: float
    worst: float = 0.0

    def attend(self, port: AttentionPort, *qkv: Tensor) -> Tensor:
        *expected, output = (x.flip(1) for x in self.first.calls[port.paged.layer_index])
        for found, right in zip(qkv, expected, strict=True):
            self.check(port.call.name, found.transpose(1, 2), right)
        return output

    def check(self, name: str, found: Tensor, expected: Tensor) -> None:
        """Raises ModelError where rows (1, T, groups, X) of the same tokens differ."""
        error = distance_of_worst_row(*(x[0].index_select(0, self.compared_C).transpose(0, 1)
                                        for x in (found, expected)))
        if not error <= self.bound:
            raise ModelError(
                f"{name}: a token changes by {error:.1%} with what else lies in its step, outside attention, and "
                f"{self.bound:.1%} is allowed (convolutions over tokens, states, positions that the model counts "
                "itself, a rotary embedding that depends on the longest position); such a model needs a strategy of "
                "its own")
        self.worst = max(self.worst, error)


def compared(own_of: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that transformers calls in `compare_at_start`. `own_of` gives its own one of a module."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
               scaling: float | None = None, **more: Any) -> tuple[Tensor, None]:
        port: Any = module.attention_port
        return port.step.comparison.attend(port, own_of(module), module, (query, key, value), attention_mask, scaling,
                                           more)

    return attend


@torch.inference_mode()
def compare_at_start(model: TransformersModel, num_positions: int, vocab_size: int,
                     own_attention: Callable[[nn.Module], AbstractContextManager[None]]) -> Distances:
    """Run one prompt under `own_attention`, which has transformers' masks and calls `compared`, then as it is served.

    Raises ModelError where the two differ: in an attention call, or in what other tokens change outside attention.
    """
    bounds = FLOAT32_BOUNDS if model.context.dtype == torch.float32 else HALF_BOUNDS
    ids_2T, positions_2T, compared_C = (x.to(model.context.device) for x in _two_runs(num_positions, vocab_size))
    resolve_windows(model, num_positions)
    steps, cache = _paged_steps(model, ids_2T.shape[1])
    layers = [module for module in model.modules() if isinstance(module, PagedAttention)]
    for layer in layers:
        layer.k_cache, layer.v_cache = cache
    comparison = model.step.comparison = Comparison(steps=steps, bound=bounds.attention)
    fusion = Fusion(model, steps, bounds.attention, distance_of_worst_row)
    with own_attention(model.causal_lm), fusion.watch():
        expected = model.causal_lm(input_ids=ids_2T[:1], position_ids=positions_2T[:1], use_cache=False).logits
    for layer in layers:
        del layer.k_cache, layer.v_cache
    model.step.comparison = None

    def run_as_served() -> float:
        replay = model.step.replay = Replay(first=comparison, compared_C=compared_C, bound=bounds.others)
        try:
            found_TV = model.compute_logits(model(ids_2T[1], positions_2T[1], None))
            replay.check("logits", found_TV[None, :, None], expected.flip(1)[:, :, None])
        finally:
            model.step.replay = None
        return replay.worst

    fusion.apply()
    try:
        others = run_as_served()
    except ModelError as difference:
        fusion.undo()
        others = run_as_served()
        logger.warning("all modules of transformers stay, as ours differ together: %s", difference)
    else:
        logger.info("%s", fusion.describe())
    return Distances(attention=comparison.worst, others=others)


def distance_of_worst_row(found_GRX: Tensor, expected_GRX: Tensor) -> float:
    """The largest RMS of a row's difference, relative to the RMS of all rows of its group."""
    # Some networks give tokens that are never sampled the lowest number of the dtype, whose square is infinite.
    is_out_GRX = (found_GRX == expected_GRX) & (expected_GRX.abs() > 1e30)
    found_GRX, expected_GRX = (x.float().masked_fill(is_out_GRX, 0.0) for x in (found_GRX, expected_GRX))
    errors_GR = (found_GRX - expected_GRX).square().mean(-1)
    sizes_G = expected_GRX.square().mean((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny)
    return (errors_GR / sizes_G[:, None]).max().sqrt().item()


def _two_runs(num_positions: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and positions (2, T) of both runs, and (C,) which of the second are the first's, at T - 1 - t."""
    num_tokens = min(NUM_TOKENS, num_positions)
    generator = torch.Generator().manual_seed(0)
    ids_2T = torch.randint(vocab_size, (2, num_tokens), generator=generator)
    positions_2T = torch.randint(num_positions, (2, num_tokens), generator=generator)
    positions_2T[0] = torch.arange(num_tokens)
    positions_2T[1, 3:4] = num_positions - 1
    is_other_T = torch.arange(num_tokens) % 4 == 3
    for x_2T in (ids_2T, positions_2T):
        x_2T[1] = torch.where(is_other_T, x_2T[1], x_2T[0].flip(0))
    return ids_2T, positions_2T, (~is_other_T).nonzero()[:, 0]


def _paged_steps(model: TransformersModel,
                 num_tokens: int) -> tuple[list[tuple[slice, AttentionMetadata]], tuple[Tensor, Tensor]]:
    """A prompt as two chunks and a decode step, and keys and values (NB, S, K, H) of a small cache for all layers."""
    context, call = model.context, model.calls[0]
    attention, device, block_size = context.attention, context.device, context.block_size
    assert block_size is not None, "a runner gives it"
    num_blocks = -(-num_tokens // block_size)
    num_kv_heads = context.tp.kv_head_share(call.num_kv_heads)[1]
    sizes = (1, 1 + num_blocks, block_size, num_kv_heads, call.head_dim)
    keys, values = make_kv_cache(sizes, context.dtype, device)
    tables_1W = np.arange(num_blocks, 0, -1, dtype=np.int32)[None]  # never block 0, and out of order
    places_T = np.arange(num_tokens)
    slots_T = (tables_1W[0, places_T // block_size] * block_size + places_T % block_size).astype(np.int32)
    slots, tables = (torch.from_numpy(array.copy()).to(device) for array in (slots_T, tables_1W))
    steps = []
    for start, stop in pairwise(sorted({0, num_tokens // 2, num_tokens - 1, num_tokens})):
        is_prefill = stop < num_tokens
        plan = (attention.plan_prefill([stop - start], [stop], tables_1W, device) if is_prefill
                else attention.plan_decode([stop], tables_1W, device))
        length = torch.tensor([stop], dtype=torch.int32, device=device)
        steps.append((slice(start, stop), AttentionMetadata(is_prefill, slots[start:stop], length, tables, plan)))
    return steps, (keys[0], values[0])
