"""Cases of attention: rotary embedding, cache write, the paged cache, replayed graphs, a tower (platforms/cases.py).

T tokens of a step, B sequences, N query heads, K kv heads, H head dim, P patches, C width of a tower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.platforms.attention import sequences_of_tokens, tower_head_dim
from npu_runner.platforms.cases import BOUNDS, Case, Side, distances
from npu_runner.platforms.graphs import GraphSettings
from npu_runner.platforms.npu.kernels import KERNELS
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs

Call = Callable[[], Tensor]
Behind = tuple[Callable[[Tensor, AttentionMetadata], Tensor], Sequence[Tensor]]
"""A function of attention's output (T, width) and the step's metadata, and its states, which begin with zeros."""
MakeBehind = Callable[[Side, int, int], Behind]
"""Makes them for a side, the width and the rows of a step."""

_TOKENS = 37
_BLOCK_SIZE, _NUM_BLOCKS = 128, 16
# A prompt that fills a block and begins the next, the rest of one, and a single token behind a context.
_DONE_LENS, _NEW_LENS = (0, 40, 8), (150, 30, 1)
_IMAGES = (60, 8)
_COMPARED = 50
_STEP = 50
"""Launches and uploads of a case that has several steps."""


class DecodeLayer(nn.Module):
    """A decoder layer's work on its cache: rotation, cache write, attention. Tokens look their heads up."""

    def __init__(self, side: Side, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None,
                 num_rows: int = 3, behind: MakeBehind | None = None):
        super().__init__()
        self.side, self.window, self.head_dim = side, window, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.attention = side.attention(num_heads, num_kv_heads, head_dim, _BLOCK_SIZE)
        self.attention.windows = (window,)
        self.k_cache, self.v_cache = _cache(side, num_kv_heads, head_dim, 2 * num_rows + 1)
        self.behind: Callable[[Tensor, AttentionMetadata], Tensor] | None = None
        self.states: Sequence[Tensor] = ()
        if behind is not None:
            self.behind, self.states = behind(side, num_heads * head_dim, num_rows)
        self.table = side.random(64, (num_heads + 2 * num_kv_heads) * head_dim, seed=10)
        self.cos, self.sin = _angles(side, head_dim)

    def forward(self, inputs: StepInputs, plan: object = None, *, is_prefill: bool = False) -> Tensor:
        """(T, N * H)"""
        heads = F.embedding(inputs.tokens, self.table).unflatten(-1, (-1, self.head_dim))
        q, k, v = (x.contiguous() for x in heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1))
        q, k = self.side.ops.rotary(q, k, F.embedding(inputs.positions, self.cos),
                                    F.embedding(inputs.positions, self.sin))
        self.attention.write_kv(k, v, self.k_cache, self.v_cache, inputs.slot_mapping)
        metadata = AttentionMetadata.from_inputs(inputs, plan, is_prefill=is_prefill)
        attend = self.attention.prefill if is_prefill else self.attention.decode
        x = attend(q, self.k_cache, self.v_cache, metadata, self.head_dim**-0.5, window=self.window).flatten(1)
        return x if self.behind is None or is_prefill else self.behind(x, metadata)

    def step(self, done_lens: Sequence[int], new_lens: Sequence[int], seed: int = 11, *, is_draft: bool = False,
             shift: int = 0) -> Tensor:
        """An eager step that adds tokens to contexts. `is_draft`: its several tokens a sequence are drafts."""
        inputs, context_lens, tables = step_inputs(self.side, done_lens, new_lens, seed, is_draft=is_draft, shift=shift)
        if is_draft and self.attention.groups_drafts:
            sequences = torch.from_numpy(sequences_of_tokens(new_lens, context_lens))
            inputs = inputs._replace(sequences=self.side.put(sequences))
        is_prefill = max(new_lens) > 1 and not is_draft
        if is_prefill:
            plan = self.attention.plan_prefill(list(new_lens), context_lens, tables, self.side.device)
        else:
            plan = self.attention.plan_decode(context_lens, tables, self.side.device,
                                              list(new_lens) if is_draft else None)
        return self(inputs, plan, is_prefill=is_prefill)


def step_inputs(side: Side, done_lens: Sequence[int], new_lens: Sequence[int], seed: int, *,
                is_draft: bool = False, shift: int = 0) -> tuple[StepInputs, list[int], np.ndarray]:
    """Inputs of a step, its context lengths and its block tables; blocks are out of order and never block 0. `shift`
    gives rows blocks that were other rows'."""
    num_rows = len(new_lens)
    tables = np.roll(np.arange(2 * num_rows, 0, -1, dtype=np.int32), shift).reshape(num_rows, 2)
    context_lens = [done + new for done, new in zip(done_lens, new_lens, strict=True)]
    places = [np.arange(done, length) for done, length in zip(done_lens, context_lens, strict=True)]
    slots = np.concatenate([tables[row, place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
                            for row, place in enumerate(places)])
    tokens = np.random.default_rng(seed).integers(0, 64, len(slots))
    rows = np.repeat(np.arange(num_rows), new_lens) if is_draft else np.arange(num_rows)
    ends = np.concatenate(places) + 1 if is_draft else context_lens

    def put(values: Any) -> Tensor:
        return side.put(torch.from_numpy(np.asarray(values, dtype=np.int32)))

    inputs = StepInputs(
        tokens=put(tokens), positions=put(np.concatenate(places)), slot_mapping=put(slots), context_lens=put(ends),
        block_tables=put(tables[rows]), token_slots=put(rows), state_slots=put(rows), runs=put([1] * len(rows)))
    return inputs, context_lens, tables


def _cache(side: Side, num_kv_heads: int, head_dim: int, num_blocks: int = _NUM_BLOCKS) -> tuple[Tensor, Tensor]:
    keys, values = (side.put(torch.zeros(num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim, dtype=side.dtype))
                    for _ in range(2))
    return keys, values


def _angles(side: Side, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, H)"""
    inverse = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = (torch.arange(512)[:, None] * inverse).repeat(1, 2)
    cos, sin = (side.put(x.bfloat16().to(side.dtype)) for x in (angles.cos(), angles.sin()))
    return cos, sin


def attention(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16",
               windows: Sequence[int] = (100,), drafts: int = 3) -> Iterator[Case]:
    heads = f"{num_heads}/{num_kv_heads} heads of {head_dim}"

    def rotary(side: Side) -> Call:
        cos, sin = _angles(side, head_dim)
        q, k = (side.random(_TOKENS, count, head_dim, seed=12 + index)
                for index, count in enumerate((num_heads, num_kv_heads)))
        # It may work in place.
        return lambda: torch.cat(side.ops.rotary(q.clone(), k.clone(), cos[-_TOKENS:], sin[-_TOKENS:]), dim=1)

    def write(side: Side) -> Call:
        places = np.random.default_rng(14).permutation(np.arange(_BLOCK_SIZE, _NUM_BLOCKS * _BLOCK_SIZE))[:150]
        slots = side.put(torch.from_numpy(places.astype(np.int32)))
        k, v = (side.random(len(places), num_kv_heads, head_dim, seed=seed) for seed in (15, 16))
        caches = _cache(side, num_kv_heads, head_dim)
        attention = side.attention(num_heads, num_kv_heads, head_dim, _BLOCK_SIZE)

        def call() -> Tensor:
            attention.write_kv(k, v, *caches, slots)
            return torch.cat([cache.flatten(0, 1) for cache in caches], dim=1)

        return call

    def attend(side: Side, window: int | None = None) -> Call:
        """A step in which some prompts go on, and one that decodes, behind one that filled contexts."""
        layer = DecodeLayer(side, num_heads, num_kv_heads, head_dim, window)
        contexts = [done + new for done, new in zip(_DONE_LENS, _NEW_LENS, strict=True)]
        layer.step((0, 0, 0), tuple(max(1, done) for done in _DONE_LENS), seed=17)
        return lambda: torch.cat([layer.step(_DONE_LENS, _NEW_LENS), layer.step(contexts, (1, 1, 1), seed=18)])

    def verify(side: Side) -> Call:
        layer = DecodeLayer(side, num_heads, num_kv_heads, head_dim)
        layer.step((0, 0), (120, 7), seed=19)
        return lambda: layer.step((120, 7), (1 + drafts, 1), seed=20, is_draft=True)

    yield Case(name=f"npu_apply_rotary_pos_emb, {heads}", prepare=rotary, dtype=dtype)
    for kernel in KERNELS["cache_write"]:
        yield Case(name=f"the cache write, {heads}", prepare=write, dtype=dtype, job="cache_write", kernel=kernel)
    yield Case(name=f"attention over the paged cache, {heads}", prepare=attend, dtype=dtype, num_launches=_STEP)
    for window in windows:
        for kernel in KERNELS["window"]:
            yield Case(name=f"attention in a window of {window}, {heads}", prepare=partial(attend, window=window),
                       dtype=dtype, job="window", kernel=kernel, num_launches=_STEP)
    for kernel in KERNELS["drafts"] if drafts else ():
        yield Case(name=f"attention of {drafts} drafts, {heads}", prepare=verify, dtype=dtype, job="drafts",
                   kernel=kernel, num_launches=_STEP)


def replay(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16", num_rows: int = 2, *,
           kind: str = "", behind: MakeBehind | None = None, drafts: int = 0, kernel: str = "",
           is_captured: bool = True) -> Case:
    """A captured decode graph, replayed with other context lengths and blocks. Every other row's context shrinks: who
    keeps an old length reads too much, or too little. `drafts`: of each sequence, by this `kernel`; in the second step
    the first sequence has those of the last one, too."""
    steps = [([(5, 200)[row % 2] + row % 40 for row in range(num_rows)], [1 + drafts] * num_rows),
             ([(131, 7)[row % 2] + row % 40 for row in range(num_rows)],
              [1 + drafts] * num_rows)]
    if num_rows > 1:
        steps[1][1][0], steps[1][1][-1] = 1 + 2 * drafts, 1
    num_tokens, is_draft = (1 + drafts) * num_rows, drafts > 0
    kind = kind or (f"{drafts} drafts" if drafts else "")

    def prepare(side: Side) -> Call:
        layer = DecodeLayer(side, num_heads, num_kv_heads, head_dim, num_rows=num_rows, behind=behind)
        layer.step([0] * num_rows, [256] * num_rows, seed=26)  # contexts of any length below
        if side.platform.name != "npu" or not is_captured:
            return lambda: torch.cat([layer.step(*lens, 27 + step, is_draft=is_draft, shift=step)
                                      for step, lens in enumerate(steps)])
        compiler = side.platform.make_graph_compiler(GraphSettings(mode="reduce-overhead", identity={}, cache_dir=None))
        graph = compiler.compile(layer.forward, num_tokens)
        def padded(number: int) -> tuple[StepInputs, np.ndarray | None]:
            inputs, context_lens, _ = step_inputs(side, *steps[number], 27 + number, is_draft=is_draft, shift=number)
            if not (is_draft and layer.attention.groups_drafts):
                return inputs, None
            sequences = sequences_of_tokens(steps[number][1], context_lens, num_tokens, num_rows + 2)
            return inputs._replace(sequences=side.put(torch.from_numpy(sequences))), sequences

        kept, *sequences = padded(0)
        compiler.before_replay(num_tokens, kept.context_lens.tolist(), *sequences)
        graph(kept)  # captures

        def call() -> Tensor:
            found = []
            for each in layer.states:
                each.zero_()
            for number in range(len(steps)):
                inputs, *sequences = padded(number)
                for old, new in zip(kept.given(), inputs.given(), strict=True):
                    old.copy_(new)
                side.platform.memory.synchronize()
                compiler.before_replay(num_tokens, inputs.context_lens.tolist(), *sequences)
                found.append(graph(kept).clone())
            return torch.cat(found)

        return call

    name = f"a captured graph of {num_tokens} rows{kind and f', {kind}'}, replayed with other context lengths"
    return Case(name=f"{name}, {num_heads}/{num_kv_heads} heads of {head_dim}", prepare=prepare, dtype=dtype,
                job="drafts" if drafts else "", kernel=kernel, gives_up="graphs", num_launches=_STEP)


def soak(minutes: float, num_rows: int = 8) -> Case:
    """Replays of one graph with other lengths each time, as in a night's job; some are compared with an eager step."""
    def prepare(side: Side) -> Call:
        if side.platform.name != "npu":
            return lambda: torch.zeros(1, 1, dtype=torch.int32)
        layer, random = DecodeLayer(side, 16, 8, 128, num_rows=num_rows), np.random.default_rng(0)
        layer.step([0] * num_rows, [256] * num_rows, seed=26)
        compiler = side.platform.make_graph_compiler(GraphSettings(mode="reduce-overhead", identity={}, cache_dir=None))
        graph = compiler.compile(layer.forward, num_rows)
        kept = step_inputs(side, [5] * num_rows, [1] * num_rows, 27)[0]

        def call() -> Tensor:
            end, number, num_wrong = time.monotonic() + 60 * minutes, 0, 0
            while time.monotonic() < end:
                lens = random.integers(1, 250, num_rows).tolist()
                inputs, context_lens, _ = step_inputs(side, lens, [1] * num_rows, number, shift=number)
                for old, new in zip(kept.given(), inputs.given(), strict=True):
                    old.copy_(new)
                compiler.before_replay(num_rows, context_lens)
                found = graph(kept).clone()
                if number % _COMPARED == 0:
                    expected = layer.step(lens, [1] * num_rows, number, shift=number)
                    num_wrong += float(distances(found, expected).max()) > BOUNDS["bfloat16"]
                number += 1
            return side.put(torch.full((1, 1), num_wrong, dtype=torch.int32))

        return call

    return Case(name=f"replays with changing lengths for {minutes:g} minutes", prepare=prepare, gives_up="graphs",
                seconds=60 * minutes + 180, is_timed=False)


def tower(num_heads: int, head_dim: int, dtype: str = "bfloat16") -> Iterator[Case]:
    """Attention and MLP of a tower over two images, (P, C); heads filled up with zeros behind each half, as weights
    are."""
    width, num_patches = num_heads * head_dim, sum(_IMAGES)

    def see(side: Side) -> Call:
        ops, attention = side.ops, side.attention(32, 8, 128, _BLOCK_SIZE)
        padding = (tower_head_dim(attention.facts, head_dim) - head_dim) // 2

        def padded(x: Tensor) -> Tensor:
            return F.pad(x.unflatten(-1, (2, head_dim // 2)), (0, padding)).flatten(-2)

        def weight(num_out: int, num_in: int, seed: int) -> Tensor:
            return side.random(num_out, num_in, seed=seed, scale=1 / math.sqrt(num_in))

        x_PC, qkv = side.random(num_patches, width, seed=21), weight(3 * width, width, 22)
        out, up, down = weight(width, width, 23), weight(2 * width, width, 24), weight(width, 2 * width, 25)
        angles = torch.arange(num_patches)[:, None] * 100.0 ** -(torch.arange(head_dim // 2) / head_dim)
        cos_PH, sin_PH = (padded(side.put(x.repeat(1, 2))) for x in (angles.cos(), angles.sin()))

        def call() -> Tensor:
            qkv_P3NH = padded(ops.linear(F.layer_norm(x_PC, (width,)), qkv, None).unflatten(
                -1, (3, num_heads, head_dim)))
            q_PNH, k_PNH = ops.rotary_in_float32(qkv_P3NH[:, :2].contiguous(), cos_PH, sin_PH)
            plan = attention.plan_vision(_IMAGES, side.device)
            out_PNH = attention.vision(q_PNH, k_PNH, qkv_P3NH[:, 2], plan, head_dim**-0.5)
            halves = out_PNH.unflatten(-1, (2, -1))[..., : head_dim // 2]
            y_PC = x_PC + ops.linear(halves.flatten(1), out, None)
            return y_PC + ops.linear(ops.gelu(ops.linear(F.layer_norm(y_PC, (width,)), up, None), "tanh"), down, None)

        return call

    for kernel in KERNELS["vision"]:
        yield Case(name=f"a layer of the vision tower, {num_heads} heads of {head_dim}", prepare=see, dtype=dtype,
                   job="vision", kernel=kernel, num_launches=_STEP)
