"""Cases of the operators that this platform calls: by themselves, for int8, and in a replayed graph.

`served` has those of the doctor: shapes of models in use, then narrow ones. Knows no model.

T tokens of a step, B sequences, N query heads, K kv heads, H head dim, S block size, P patches, C width of a tower, D
hidden size, I inputs or an expert's width, O outputs, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.platforms.attention import tower_head_dim
from npu_runner.platforms.cases import BOUNDS, Case, Side
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.platforms.graphs import GraphSettings
from npu_runner.platforms.grouped import GROUPED, GroupedWeight, packed
from npu_runner.platforms.npu.kernels import KERNELS
from npu_runner.platforms.platform import ModelNeeds
from npu_runner.platforms.quantised import (
    INT8,
    INT8_EXPERTS,
    INT8_STATIC,
    Int8Rows,
    Int8Weight,
    NormRounding,
    QuantisedExperts,
    StaticInt8Weight,
)
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs

Call = Callable[[], Tensor]

_BLOCK_SIZE, _NUM_BLOCKS = 128, 16
_EPS = 1e-6
# A prompt that fills a block and begins the next, the rest of one, and a single token behind a context.
_DONE_LENS, _NEW_LENS = (0, 40, 8), (150, 30, 1)
_IMAGES = (60, 8)
_TOKENS, _FEW, _LOGITS = 37, 3, 9
_STEP = 50
"""Launches and uploads of a case that has several steps."""
_VOCABULARY = 151_936
_INPUT_SCALE, _INPUT_OFFSET = 1 / 32, -9
"""A power of two: it is the same in every dtype, and so is its reciprocal."""


def served(asked: object = None) -> list[Case]:
    """The doctor's. `asked`: names to look for; None: all."""
    found = [
        *(case for dtype in ("bfloat16", "float16") for case in _of_every_model(dtype)),
        *(case for heads in ((32, 8, 128), (16, 16, 128), (14, 2, 64), (16, 2, 256)) for case in _attention(*heads)),
        *(case for head_dim in (64, 72, 80) for case in _tower(16, head_dim)),
        *_quantised(2048, 6144), *_grouped(2048, 6144),
        *(case for width in (768, 64, 96, 48) for case in _experts(8, 4, 1024, width)),
        *(_replay(32, 8, 128, num_rows=num_rows) for num_rows in (1, 2, 6)),
        *_states(GatedDeltaShape(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)),
        *_sampling(),
    ]
    names = asked if isinstance(asked, list) else []
    return [case for case in found if not names or any(name in case.title for name in names)]


def of_model(asked: dict[str, Any]) -> list[Case]:
    """The few of a model's start. `asked`: the fields of its ModelNeeds."""
    needs = ModelNeeds(**{**asked, "states": asked["states"] and GatedDeltaShape(**asked["states"])})
    if needs.dtype not in BOUNDS:
        return []
    heads, dtype = (needs.num_heads, needs.num_kv_heads, needs.head_dim), needs.dtype
    found = [_add_norm(needs.hidden_size, dtype), *_attention(*heads, dtype, needs.windows, needs.num_drafts)]
    if needs.tower is not None:
        found += _tower(*needs.tower, dtype)
    if needs.mlp_width is not None:
        found += [case for case in _quantised(needs.hidden_size, needs.mlp_width, dtype)
                  if case.gives_up in needs.forms]
        found += _grouped(needs.hidden_size, needs.mlp_width, dtype) if GROUPED in needs.forms else []
    if needs.experts is not None:
        count, top_k, width = needs.experts
        found += [case for case in _experts(min(count, 16), min(top_k, 16), needs.hidden_size, width, dtype)
                  if case.gives_up in ("", *needs.forms)]
    if needs.states is not None:
        found += _states(needs.states, dtype)
    if needs.graph_mode == "reduce-overhead":
        found.append(_replay(*heads, dtype))
    return found


# -- what every model does ---------------------------------------------------------------------------------------------


def _of_every_model(dtype: str) -> Iterator[Case]:
    """Of Qwen3-8B."""
    hidden, width = 4096, 12288

    def linear(side: Side) -> Call:
        return partial(side.ops.linear, side.random(_TOKENS, hidden, seed=1),
                       side.random(2048, hidden, seed=2, scale=hidden**-0.5), None)

    def norm(side: Side) -> Call:
        weight = 1 + side.random(hidden, seed=3, scale=0.1)
        return partial(side.ops.rms_norm, side.random(_TOKENS, hidden, seed=1), weight, _EPS)

    def swiglu(side: Side) -> Call:
        return partial(side.ops.silu_and_mul, side.random(_TOKENS, 2 * width, seed=5))

    operations = 2 * _TOKENS * hidden * 2048
    yield Case(name=f"linear, {hidden} to 2048", prepare=linear, dtype=dtype, num_operations=operations)
    yield Case(name=f"npu_rms_norm, {hidden}", prepare=norm, dtype=dtype)
    yield _add_norm(hidden, dtype)
    yield Case(name=f"npu_swiglu, {width}", prepare=swiglu, dtype=dtype)


def _add_norm(hidden: int, dtype: str) -> Case:
    def prepare(side: Side) -> Call:
        given = side.random(_TOKENS, hidden, seed=1), side.random(_TOKENS, hidden, seed=4)
        weight = 1 + side.random(hidden, seed=3, scale=0.1)
        return lambda: torch.cat(side.ops.add_rms_norm(*given, weight, _EPS), dim=1)

    return Case(name=f"npu_add_rms_norm, {hidden}", prepare=prepare, dtype=dtype)


# -- attention over the paged cache ------------------------------------------------------------------------------------


class DecodeLayer(nn.Module):
    """A decoder layer's work on its cache: rotation, cache write, attention. Tokens look their heads up."""

    def __init__(self, side: Side, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None):
        super().__init__()
        self.side, self.window, self.head_dim = side, window, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.attention = side.attention(num_heads, num_kv_heads, head_dim, _BLOCK_SIZE)
        self.attention.windows = (window,)
        self.k_cache, self.v_cache = _cache(side, num_kv_heads, head_dim)
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
        return attend(q, self.k_cache, self.v_cache, metadata, self.head_dim**-0.5, window=self.window).flatten(1)

    def step(self, done_lens: Sequence[int], new_lens: Sequence[int], seed: int = 11, *,
             is_draft: bool = False) -> Tensor:
        """An eager step that adds tokens to contexts. `is_draft`: its several tokens a sequence are drafts."""
        inputs, context_lens, tables = step_inputs(self.side, done_lens, new_lens, seed, is_draft=is_draft)
        is_prefill = max(new_lens) > 1 and not is_draft
        if is_prefill:
            plan = self.attention.plan_prefill(list(new_lens), context_lens, tables, self.side.device)
        else:
            plan = self.attention.plan_decode(context_lens, tables, self.side.device,
                                              list(new_lens) if is_draft else None)
        return self(inputs, plan, is_prefill=is_prefill)


def step_inputs(side: Side, done_lens: Sequence[int], new_lens: Sequence[int], seed: int, *,
                is_draft: bool = False) -> tuple[StepInputs, list[int], np.ndarray]:
    """Inputs of a step, its context lengths and its block tables; blocks are out of order and never block 0."""
    num_rows = len(new_lens)
    tables = np.arange(_NUM_BLOCKS - 1, _NUM_BLOCKS - 1 - 2 * num_rows, -1, dtype=np.int32).reshape(num_rows, 2)
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


def _cache(side: Side, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    keys, values = (side.put(torch.zeros(_NUM_BLOCKS, _BLOCK_SIZE, num_kv_heads, head_dim, dtype=side.dtype))
                    for _ in range(2))
    return keys, values


def _angles(side: Side, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, H)"""
    inverse = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = (torch.arange(512)[:, None] * inverse).repeat(1, 2)
    cos, sin = (side.put(x.bfloat16().to(side.dtype)) for x in (angles.cos(), angles.sin()))
    return cos, sin


def _attention(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16",
               windows: Sequence[int] = (100,), drafts: int = 3) -> Iterator[Case]:
    heads = f"{num_heads}/{num_kv_heads} heads of {head_dim}"

    def rotary(side: Side) -> Call:
        cos, sin = _angles(side, head_dim)
        q, k = (side.random(_TOKENS, count, head_dim, seed=count) for count in (num_heads, num_kv_heads))
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
    if drafts:
        yield Case(name=f"attention of {drafts} drafts, {heads}", prepare=verify, dtype=dtype, num_launches=_STEP)


def _replay(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16", num_rows: int = 2) -> Case:
    """A captured decode graph, replayed with other context lengths and blocks. Every other row's context shrinks: who
    keeps an old length reads too much, or too little."""
    steps = [[(5, 200)[row % 2] + row for row in range(num_rows)], [(131, 7)[row % 2] + row for row in range(num_rows)]]

    def prepare(side: Side) -> Call:
        layer = DecodeLayer(side, num_heads, num_kv_heads, head_dim)
        layer.step([0] * num_rows, [256] * num_rows, seed=26)  # contexts of any length below
        if side.platform.name != "npu":
            return lambda: torch.cat([layer.step(lens, [1] * num_rows, 27 + step) for step, lens in enumerate(steps)])
        compiler = side.platform.make_graph_compiler(GraphSettings(mode="reduce-overhead", identity={}, cache_dir=None))
        graph, kept = compiler.compile(layer.forward, num_rows), step_inputs(side, steps[0], [1] * num_rows, 27)[0]

        def call() -> Tensor:
            found = []
            for step, lens in enumerate(steps):
                inputs, context_lens, _ = step_inputs(side, lens, [1] * num_rows, 27 + step)
                for old, new in zip(kept, inputs, strict=True):
                    old.copy_(new)
                side.platform.memory.synchronize()
                compiler.before_replay(num_rows, context_lens)
                found.append(graph(kept).clone())
            return torch.cat(found)

        return call

    return Case(name=f"a captured graph of {num_rows} rows, replayed with other context lengths, "
                f"{num_heads}/{num_kv_heads} heads of {head_dim}", prepare=prepare, dtype=dtype, gives_up="graphs",
                num_launches=_STEP)


def _tower(num_heads: int, head_dim: int, dtype: str = "bfloat16") -> Iterator[Case]:
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


# -- quantised weights -------------------------------------------------------------------------------------------------


def _int8_operands(side: Side, num_in: int, num_out: int) -> tuple[Tensor, Tensor, Tensor]:
    values_OI = side.integers(-127, 128, num_out, num_in, seed=30, dtype=torch.int8)
    scales_O = side.put(torch.rand(num_out, generator=torch.Generator().manual_seed(31)) / 127)
    return values_OI, scales_O, side.random(num_out, seed=32).float()


def _quantised(num_in: int, num_out: int, dtype: str = "bfloat16") -> Iterator[Case]:
    """int8 with inputs that are rounded, with a bias, and behind a norm that rounds."""

    def norm_inputs(side: Side) -> tuple[Tensor, Tensor, Tensor]:
        return (side.random(_TOKENS, num_in, seed=33), side.random(_TOKENS, num_in, seed=34),
                1 + side.random(num_in, seed=35, scale=0.125))

    def by_row(side: Side) -> Call:
        ops, (values_OI, scales_O, bias_O) = side.quantised_ops, _int8_operands(side, num_in, num_out)
        weight, x_TI = ops.prepare_weight(Int8Weight(values_OI, scales_O)), norm_inputs(side)[0]
        return lambda: ops.linear(x_TI, weight, bias_O)

    def by_one_scale(side: Side) -> Call:
        ops, (values_OI, scales_O, bias_O) = side.quantised_ops, _int8_operands(side, num_in, num_out)
        x_TI = norm_inputs(side)[0]
        shifts_O = (1000 * bias_O).int() - _INPUT_OFFSET * values_OI.cpu().sum(1).int().to(side.device)
        prepared = ops.prepare_weight(Int8Weight(values_OI, scales_O))
        weight = StaticInt8Weight(prepared[0], shifts_O, scales_O * _INPUT_SCALE,
                                  *(side.put(torch.full((1,), value, dtype=x_TI.dtype))
                                    for value in (1 / _INPUT_SCALE, _INPUT_OFFSET)))
        return lambda: ops.linear(x_TI, weight, None)

    def behind_norm(side: Side, is_static: bool) -> Call:
        """The rounded rows of a norm, as numbers, and the sum before it."""
        ops, given = side.quantised_ops, norm_inputs(side)
        rounding: Any = INT8 if not is_static else NormRounding(*(
            side.put(torch.full((num_in,), value, dtype=side.dtype)) for value in (_INPUT_SCALE, _INPUT_OFFSET)))

        def call() -> Tensor:
            rows, total_TI = ops.add_rms_norm(*given, _EPS, rounding)
            numbers = rows.values_TI.to(total_TI.dtype)
            if isinstance(rows, Int8Rows):
                numbers = numbers * rows.scales_T[:, None].to(total_TI.dtype)
            else:
                numbers = (numbers - _INPUT_OFFSET) * _INPUT_SCALE
            return torch.cat((numbers, total_TI), dim=1)

        return call

    shape, operations = f"{num_in} to {num_out}", 2 * _TOKENS * num_in * num_out
    for layout in KERNELS["layout"]:
        yield Case(name=f"npu_quant_matmul of rows, {shape}", prepare=by_row, dtype=dtype, job="layout", kernel=layout,
                   gives_up=INT8, num_operations=operations)
        yield Case(name=f"npu_quant_matmul of one scale, {shape}", prepare=by_one_scale, dtype=dtype, job="layout",
                   kernel=layout, gives_up=INT8_STATIC, num_operations=operations)
    for kernel in KERNELS["norm"]:
        yield Case(name=f"a norm that rounds rows, {num_in}", prepare=partial(behind_norm, is_static=False),
                   dtype=dtype, job="norm", kernel=kernel, gives_up=INT8)
        yield Case(name=f"a norm that rounds by one scale, {num_in}", prepare=partial(behind_norm, is_static=True),
                   dtype=dtype, job="norm", kernel=kernel, gives_up=INT8_STATIC)


def _grouped(num_in: int, num_out: int, dtype: str = "bfloat16") -> Iterator[Case]:
    """Weights of 4 and 8 bits with a scale for each output, or for each 128 of its inputs."""

    def multiply(side: Side, bits: int, group_size: int) -> Call:
        values = side.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), num_out, num_in, seed=36, dtype=torch.int8)
        num_groups = num_in // group_size if group_size else 1
        scales = (1 + side.random(num_out, num_groups, seed=37).abs()) / 128
        weight = GroupedWeight(values if bits == 8 else packed(values.cpu()).to(side.device), scales, None)
        ops, x_TI = side.quantised_ops, side.random(_TOKENS, num_in, seed=38)
        prepared = ops.prepare_weight(weight)
        return lambda: ops.linear(x_TI, prepared, None)

    for bits, group_size in ((4, 0), (4, 128), (8, 0), (8, 128)):
        by = f"in groups of {group_size}" if group_size else "by output"
        yield Case(name=f"npu_weight_quant_batchmatmul of {bits} bits {by}, {num_in} to {num_out}",
                   prepare=partial(multiply, bits=bits, group_size=group_size), dtype=dtype, gives_up=GROUPED,
                   num_operations=2 * _TOKENS * num_in * num_out)


# -- experts -----------------------------------------------------------------------------------------------------------


def _experts(count: int, top_k: int, hidden: int, width: int, dtype: str = "bfloat16") -> Iterator[Case]:
    def routed(side: Side, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, weights (T, K), and experts that no side's rounding decides."""
        order = np.random.default_rng(40).permuted(np.tile(np.arange(count), (num_tokens, 1)), axis=1)[:, :top_k]
        weights = F.softmax(side.random(num_tokens, top_k, seed=41), dim=-1)
        return (side.random(num_tokens, hidden, seed=42), weights,
                side.put(torch.from_numpy(order.astype(np.int32))))

    def route(side: Side) -> Call:
        logits = side.random(_TOKENS, count, seed=43)
        return lambda: side.ops.route(logits, top_k, renormalise=True)[0].sort(dim=-1).values

    def matrices(side: Side, *, is_int8: bool) -> tuple[Any, Any]:
        found = []
        for seed, num_out, num_in in ((44, 2 * width, hidden), (45, hidden, width)):
            if is_int8:
                values = side.integers(-127, 128, count, num_out, num_in, seed=seed, dtype=torch.int8)
                scales = side.put(torch.rand(count, num_out, generator=torch.Generator().manual_seed(seed)) / 127 / 8)
            else:
                values = side.random(count, num_out, num_in, seed=seed, scale=num_in**-0.5)
            values = values.transpose(1, 2).contiguous() if side.ops.experts_in_out else values
            found.append(QuantisedExperts(values, scales) if is_int8 else values)
        return found[0], found[1]

    def run(side: Side, num_tokens: int) -> Call:
        given, (gate_up, down) = routed(side, num_tokens), matrices(side, is_int8=False)
        return lambda: side.ops.experts(*given, gate_up, down)

    def run_int8(side: Side, num_tokens: int) -> Call:
        ops, given = side.quantised_ops, routed(side, num_tokens)
        prepared = ops.prepare_experts(*matrices(side, is_int8=True), side.dtype)
        return lambda: ops.experts(*given, *prepared)

    shape = f"{top_k} of {count} experts, {hidden} to {width}"
    yield Case(name=f"npu_moe_gating_top_k_softmax_v2, {top_k} of {count} experts", prepare=route, dtype=dtype)
    for num_tokens in (_TOKENS, _FEW):
        operations = 6 * num_tokens * top_k * hidden * width
        yield Case(name=f"{shape}, {num_tokens} tokens", prepare=partial(run, num_tokens=num_tokens), dtype=dtype,
                   num_operations=operations)
        for kernel in KERNELS["experts"]:
            yield Case(name=f"int8: {shape}, {num_tokens} tokens", prepare=partial(run_int8, num_tokens=num_tokens),
                       dtype=dtype, job="experts", kernel=kernel, gives_up=INT8_EXPERTS, num_operations=operations)


# -- states ------------------------------------------------------------------------------------------------------------


def _states(shape: GatedDeltaShape, dtype: str = "bfloat16") -> Iterator[Case]:
    """Of a decode step: the convolution, the gated delta rule, and the states that both leave."""
    num_rows = 4

    def inputs(side: Side) -> tuple[Any, AttentionMetadata]:
        slots = side.put(torch.arange(num_rows, 0, -1, dtype=torch.int32))
        zeros = side.put(torch.zeros(num_rows, dtype=torch.int32))
        metadata = AttentionMetadata(False, zeros, zeros + 9, zeros[:, None], None, slots)
        return side.platform.make_gated_delta(shape, side.dtype), metadata

    def convolve(side: Side) -> Call:
        backend, metadata = inputs(side)
        x = side.random(num_rows, shape.num_channels, seed=50)
        weight = side.random(shape.num_channels, shape.conv_kernel_size, seed=51)
        state = side.random(num_rows + 1, *shape.conv_state_shape, seed=52)

        def call() -> Tensor:
            kept = state.clone()
            return torch.cat((backend.convolve(x, weight, kept, metadata), kept[1:].flatten(1)), dim=1)

        return call

    def rule(side: Side) -> Call:
        backend, metadata = inputs(side)
        qkv = side.random(num_rows, shape.num_channels, seed=53)
        a, b = (side.random(num_rows, shape.num_v_heads, seed=seed) for seed in (54, 55))
        rate, bias = (side.random(shape.num_v_heads, seed=seed).float() for seed in (56, 57))
        state = side.random(num_rows + 1, *shape.state_shape, seed=58).float()

        def call() -> Tensor:
            kept = state.clone()
            out = backend.delta_rule(qkv, a, b, -rate.exp(), bias, kept, metadata)
            return torch.cat((out.flatten(1).float(), kept[1:].flatten(1)), dim=1)

        return call

    heads = f"{shape.num_k_heads}/{shape.num_v_heads} heads of {shape.head_k_dim}"
    yield Case(name=f"the convolution of Gated DeltaNet, {heads}", prepare=convolve, dtype=dtype)
    yield Case(name=f"the gated delta rule, {heads}", prepare=rule, dtype=dtype)


# -- sampling ----------------------------------------------------------------------------------------------------------


def _sampling() -> Iterator[Case]:
    """In the sizes of a job. What is decided by one rounding is compared by the values that it decides between."""

    def logits(side: Side) -> Tensor:
        return side.random(_LOGITS, _VOCABULARY, seed=60).float()

    def largest(side: Side) -> Call:
        rows = logits(side)
        return lambda: rows.gather(1, rows.argmax(-1, keepdim=True))

    def top(side: Side) -> Call:
        rows = logits(side)
        return lambda: rows.topk(64, dim=-1).values

    def sort(side: Side) -> Call:
        rows = logits(side)
        return lambda: side.ops.sort_ascending(rows)

    def total(side: Side) -> Call:
        rows = side.integers(0, 9, _LOGITS, _VOCABULARY, seed=61, dtype=torch.int32)
        return lambda: rows.cumsum(-1, dtype=torch.int32)

    def count(side: Side) -> Call:
        table = side.put(torch.zeros(256 * _VOCABULARY))
        places = side.put(torch.arange(_LOGITS) * _VOCABULARY + 7)
        ones = side.put(torch.ones(_LOGITS))

        def call() -> Tensor:
            side.ops.add_at(table, places, ones)
            table.index_fill_(0, places, 1.0)
            return table.index_select(0, places)[:, None]

        return call

    def add(side: Side) -> Call:
        rows, amounts = logits(side), side.random(_LOGITS, 64, seed=62).float()
        places = side.put(torch.arange(64)[None].repeat(_LOGITS, 1) * 2000)
        return lambda: rows.clone().scatter_add_(1, places, amounts)

    rows = f"{_LOGITS} x {_VOCABULARY}"
    for name, prepare in {"argmax and gather": largest, "topk of 64": top, "sort": sort, "cumsum of int32": total,
                          "scatter_add_ of 64 a row": add}.items():
        yield Case(name=f"{name}, {rows}", prepare=prepare)
    yield Case(name=f"counts of tokens, 256 x {_VOCABULARY}", prepare=count)
