"""Operators, matmuls of int8 and a replayed graph that a start on CANN 8.5 computes on the device and on the CPU, which
must agree. Where another kernel can do the job of one that does not, it is tried, too. Knows no model.

T tokens of a step, B sequences, N query heads, K kv heads, H head dim, S block size, P patches, C width of a tower, I
inputs, O outputs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.errors import ConfigError
from npu_runner.platforms import reference_platform
from npu_runner.platforms.attention import AttentionBackend, tower_head_dim
from npu_runner.platforms.graphs import GraphCompiler, GraphResourceError
from npu_runner.platforms.npu.attention import NpuAttention
from npu_runner.platforms.npu.cann85 import REMEDY
from npu_runner.platforms.npu.kernels import CACHE_WRITES, FIRST_CHOICES, VISION_ATTENTIONS, Kernels
from npu_runner.platforms.npu.ops import NpuOps
from npu_runner.platforms.npu.quantised_ops import NpuQuantisedOps
from npu_runner.platforms.ops import Ops
from npu_runner.platforms.platform import ModelNeeds
from npu_runner.platforms.quantised import INT8, INT8_STATIC, Int8Weight, NormRounding, QuantisedOps, StaticInt8Weight
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs

logger = logging.getLogger(__name__)
_On = TypeVar("_On")

BOUND = 0.03
"""The largest distance of a row from the CPU's, relative to its length. In bfloat16, rounding causes at most a third of
it."""
_SEED = 85
_NUM_BLOCKS = 8
_VOCAB = 64
# A prompt that fills a block and begins the next, the rest of one, and a single token behind a context.
_DONE_LENS, _NEW_LENS = (0, 40, 8), (150, 30, 1)
_IMAGES = (60, 8)
_MOST_POSITIONS = 512
# Contexts before each replay. The second row's shrinks: who keeps an old length reads too much, or too little.
_REPLAYED_LENS = ((5, 200), (131, 7))
_NUM_TOKENS, _NUM_INPUTS, _NUM_OUTPUTS = 37, 512, 384
_INPUT_SCALE, _INPUT_OFFSET, _EPS = 1 / 32, -9, 1e-6
"""A power of two: it is the same in every dtype, and so is its reciprocal."""


class Side:
    """Operators and attention of one platform with its device and dtype; both sides get the same random numbers."""

    def __init__(self, ops: Ops, attention: AttentionBackend, device: torch.device, dtype: torch.dtype):
        self.ops, self.attention, self.device, self.dtype = ops, attention, device, dtype

    @classmethod
    def from_npu(cls, needs: ModelNeeds, *, masks_decode: bool, kernels: Kernels) -> Side:
        device = torch.device("npu", torch.npu.current_device())
        attention = NpuAttention(num_heads=needs.num_heads, num_kv_heads=needs.num_kv_heads,
                                 block_size=needs.block_size, device=device, masks_decode=masks_decode, kernels=kernels)
        return cls(NpuOps(), attention, device, getattr(torch, needs.dtype))

    @classmethod
    def from_cpu(cls, needs: ModelNeeds) -> Side:
        platform = reference_platform()
        attention = platform.make_attention(
            "auto", num_heads=needs.num_heads, num_kv_heads=needs.num_kv_heads, head_dim=needs.head_dim,
            block_size=needs.block_size, dtype=torch.float32)
        return cls(platform.make_ops(), attention, torch.device("cpu"), torch.float32)

    def random(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        """Normal numbers, rounded to bfloat16 on both sides."""
        generator = torch.Generator().manual_seed(_SEED + seed)
        return (torch.randn(shape, generator=generator) * scale).bfloat16().to(self.device, self.dtype)

    def ints(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self.device)

    def cache(self, needs: ModelNeeds) -> tuple[Tensor, Tensor]:
        shape = (_NUM_BLOCKS, needs.block_size, needs.num_kv_heads, needs.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return keys, values


class DecodeLayer(nn.Module):
    """A decoder layer's work on its cache: rotation, cache write, attention. Tokens look their heads up."""

    def __init__(self, side: Side, needs: ModelNeeds):
        super().__init__()
        self.side, self.needs = side, needs
        self.k_cache, self.v_cache = side.cache(needs)
        heads = needs.num_heads + 2 * needs.num_kv_heads
        self.table = side.random(_VOCAB, heads * needs.head_dim, seed=1)
        self.cos, self.sin = _angles(side, needs.head_dim)

    def forward(self, inputs: StepInputs, plan: object = None, *, is_prefill: bool = False) -> Tensor:
        """(T, N * H)"""
        needs, side = self.needs, self.side
        heads = F.embedding(inputs.tokens, self.table).unflatten(-1, (-1, needs.head_dim))
        q, k, v = (x.contiguous() for x in heads.split(
            [needs.num_heads, needs.num_kv_heads, needs.num_kv_heads], dim=1))
        q, k = side.ops.rotary(q, k, F.embedding(inputs.positions, self.cos), F.embedding(inputs.positions, self.sin))
        side.attention.write_kv(k, v, self.k_cache, self.v_cache, inputs.slot_mapping)
        metadata = AttentionMetadata.from_inputs(inputs, plan, is_prefill=is_prefill)
        attend = side.attention.prefill if is_prefill else side.attention.decode
        return attend(q, self.k_cache, self.v_cache, metadata, needs.head_dim**-0.5).flatten(1)

    def step(self, done_lens: Sequence[int], new_lens: Sequence[int], seed: int = 2) -> Tensor:
        """An eager step that adds tokens to contexts."""
        inputs, context_lens, tables = step_inputs(self.side, self.needs, done_lens, new_lens, seed)
        is_prefill, attention = max(new_lens) > 1, self.side.attention
        plan = (attention.plan_prefill(list(new_lens), context_lens, tables, self.side.device) if is_prefill
                else attention.plan_decode(context_lens, tables, self.side.device))
        return self(inputs, plan, is_prefill=is_prefill)


def step_inputs(side: Side, needs: ModelNeeds, done_lens: Sequence[int], new_lens: Sequence[int],
                seed: int) -> tuple[StepInputs, list[int], np.ndarray]:
    """Inputs of a step, its context lengths and its block tables; blocks are out of order and never block 0."""
    size, num_rows = needs.block_size, len(new_lens)
    tables = np.arange(_NUM_BLOCKS - 1, _NUM_BLOCKS - 1 - 2 * num_rows, -1, dtype=np.int32).reshape(num_rows, 2)
    context_lens = [done + new for done, new in zip(done_lens, new_lens, strict=True)]
    places = [np.arange(done, length) for done, length in zip(done_lens, context_lens, strict=True)]
    slots = np.concatenate([tables[row, place // size] * size + place % size for row, place in enumerate(places)])
    tokens = np.random.default_rng(_SEED + seed).integers(0, _VOCAB, len(slots))
    inputs = StepInputs(tokens=side.ints(tokens), positions=side.ints(np.concatenate(places)),
                        slot_mapping=side.ints(slots), context_lens=side.ints(context_lens),
                        block_tables=side.ints(tables), token_slots=side.ints(range(num_rows)),
                        state_slots=side.ints(range(num_rows)), runs=side.ints([1] * num_rows))
    return inputs, context_lens, tables


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest distance of a row from what it should be, over the row's length; rows of zeros count as short ones.
    NaN where some value is."""
    found, expected = found.cpu().double().flatten(1), expected.double().flatten(1)
    lengths = expected.norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / lengths.clamp(min=0.1 * float(lengths.mean()))).max())


class _Probe(NamedTuple):
    """`kernels`: what can do it, the first choice first. `job`: the field of Kernels that says which does."""

    what: str
    heads: str
    compute: Callable[[Side], Tensor]
    kernels: tuple[str, ...]
    job: str | None = None


def prove_operators(needs: ModelNeeds, cann: str, *, masks_decode: bool) -> Kernels:
    """The kernels that agree with the CPU, the first choices where they do.

    Raises ConfigError with the name of the first operator for which no kernel does: each is refused, or differs.
    """
    cpu, kernels = Side.from_cpu(needs), FIRST_CHOICES
    for probe in _probes(needs):
        findings: list[str] = []
        for name in probe.kernels:
            tried = kernels if probe.job is None else replace(kernels, **{probe.job: name})
            npu = Side.from_npu(needs, masks_decode=masks_decode, kernels=tried)
            finding = _finding(probe.compute, npu, cpu)
            if finding is None:
                break
            findings.append(f"{probe.what} ({name}, {probe.heads}) {finding}")
        else:
            raise ConfigError(f"CANN {cann}: {'; '.join(findings)}; {REMEDY}")
        kernels = tried
        if findings:
            logger.warning("CANN %s: %s; %s agrees and is used", cann, "; ".join(findings), name)
    return kernels


def _probes(needs: ModelNeeds) -> Iterator[_Probe]:
    heads = f"{needs.num_heads}/{needs.num_kv_heads} heads of {needs.head_dim}"
    yield _Probe("the rotation of q and k", heads, partial(_rotated, needs=needs), ("npu_apply_rotary_pos_emb",))
    yield _Probe("the cache write", heads, partial(_written, needs=needs), tuple(CACHE_WRITES),
                 "cache_write")
    yield _Probe("attention over the paged cache", heads, partial(_attended, needs=needs),
                 ("npu_fused_infer_attention_score",))
    if needs.tower is not None:
        num_heads, head_dim = needs.tower
        yield _Probe("a layer of the vision tower", f"{num_heads} heads of {head_dim}", partial(_seen, needs=needs),
                     tuple(VISION_ATTENTIONS), "vision")


def _finding(compute: Callable[[_On], Tensor], npu: _On, cpu: _On, refused: str = "is refused") -> str | None:
    """The fault of what the device computes, if any."""
    try:
        found = compute(npu).cpu()
    except (RuntimeError, OSError, GraphResourceError) as error:  # OSError: libraries for ATB are missing
        return f"{refused}: {str(error).strip().partition(chr(10))[0]}"
    distance = difference(found, compute(cpu))
    if distance <= BOUND:
        return None
    return f"differs from the CPU by {100 * distance:.1f} % of a row's length, {100 * BOUND:.0f} % is allowed"


def _angles(side: Side, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, H)"""
    inverse = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = (torch.arange(_MOST_POSITIONS)[:, None] * inverse).repeat(1, 2)
    cos, sin = (x.bfloat16().to(side.device, side.dtype) for x in (angles.cos(), angles.sin()))
    return cos, sin


def _rotated(side: Side, needs: ModelNeeds) -> Tensor:
    """Both, token by token (T, (N + K) * H)."""
    cos, sin = _angles(side, needs.head_dim)
    num_tokens = 37
    q, k = (side.random(num_tokens, count, needs.head_dim, seed=seed)
            for seed, count in ((3, needs.num_heads), (4, needs.num_kv_heads)))
    return torch.cat(side.ops.rotary(q, k, cos[-num_tokens:], sin[-num_tokens:]), dim=1)


def _written(side: Side, needs: ModelNeeds) -> Tensor:
    """The whole of both caches, slot by slot."""
    slots = np.random.default_rng(_SEED).permutation(np.arange(needs.block_size, _NUM_BLOCKS * needs.block_size))[:150]
    k, v = (side.random(len(slots), needs.num_kv_heads, needs.head_dim, seed=seed) for seed in (5, 6))
    caches = side.cache(needs)
    side.attention.write_kv(k, v, *caches, side.ints(slots))
    return torch.cat([cache.flatten(0, 1) for cache in caches], dim=1)


def _attended(side: Side, needs: ModelNeeds) -> Tensor:
    """A step that fills contexts, one in which some prompts go on, and one that decodes."""
    layer = DecodeLayer(side, needs)
    contexts = [done + new for done, new in zip(_DONE_LENS, _NEW_LENS, strict=True)]
    layer.step((0, 0, 0), tuple(max(1, done) for done in _DONE_LENS), seed=7)
    return torch.cat([layer.step(_DONE_LENS, _NEW_LENS), layer.step(contexts, (1, 1, 1), seed=8)])


def _seen(side: Side, needs: ModelNeeds) -> Tensor:
    """Attention and MLP of a tower over two images, (P, C); heads filled up with zeros behind each half, as weights
    are."""
    assert needs.tower is not None, "asked for towers alone"
    num_heads, head_dim = needs.tower
    width, num_patches, ops = num_heads * head_dim, sum(_IMAGES), side.ops
    padding = (tower_head_dim(side.attention.facts, head_dim) - head_dim) // 2

    def padded(x: Tensor) -> Tensor:
        return F.pad(x.unflatten(-1, (2, head_dim // 2)), (0, padding)).flatten(-2)

    def linear(x: Tensor, width_out: int, seed: int) -> Tensor:
        return ops.linear(x, side.random(width_out, x.shape[-1], seed=seed, scale=1 / math.sqrt(x.shape[-1])), None)

    x_PC = side.random(num_patches, width, seed=9)
    qkv_P3NH = padded(linear(F.layer_norm(x_PC, (width,)), 3 * width, 10).unflatten(-1, (3, num_heads, head_dim)))
    angles = torch.arange(num_patches)[:, None] * 100.0 ** -(torch.arange(head_dim // 2) / head_dim)
    cos_PH, sin_PH = (padded(x.repeat(1, 2)).to(side.device) for x in (angles.cos(), angles.sin()))
    q_PNH, k_PNH = ops.rotary_in_float32(qkv_P3NH[:, :2].contiguous(), cos_PH, sin_PH)
    plan = side.attention.plan_vision(_IMAGES, side.device)
    out_PNH = side.attention.vision(q_PNH, k_PNH, qkv_P3NH[:, 2], plan, head_dim**-0.5)
    halves = out_PNH.unflatten(-1, (2, -1))[..., : head_dim // 2]
    x_PC = x_PC + linear(halves.flatten(1), width, 11)
    return x_PC + linear(ops.gelu(linear(F.layer_norm(x_PC, (width,)), 2 * width, 12), "tanh"), width, 13)


# -- matmuls of int8 ---------------------------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    """The operators of one side, and operands that differ between the sides only in dtype."""

    ops: QuantisedOps
    x_TI: Tensor
    residual_TI: Tensor
    gain_I: Tensor
    values_OI: Tensor
    scales_O: Tensor
    bias_O: Tensor


def why_unproven(forms: Iterable[str]) -> dict[str, str]:
    """The findings about matmuls of int8, by form; the device is the current one."""
    npu = _numbers(NpuQuantisedOps(NpuOps()), torch.device("npu", torch.npu.current_device()), torch.bfloat16)
    cpu = _numbers(QuantisedOps(reference_platform().make_ops()), torch.device("cpu"), torch.float32)
    findings = {form: _finding(_MATMULS[form], npu, cpu) if form in _MATMULS else f"{form} has no probe"
                for form in forms}
    return {form: finding for form, finding in findings.items() if finding is not None}


def _numbers(ops: QuantisedOps, device: torch.device, dtype: torch.dtype) -> _Numbers:
    generator = torch.Generator().manual_seed(85)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    values_OI = torch.randint(-127, 128, (_NUM_OUTPUTS, _NUM_INPUTS), generator=generator, dtype=torch.int8)
    scales_O = torch.rand(_NUM_OUTPUTS, generator=generator) / 127
    inputs = normal(_NUM_TOKENS, _NUM_INPUTS), normal(_NUM_TOKENS, _NUM_INPUTS), 1 + normal(_NUM_INPUTS) / 8
    return _Numbers(ops, *(each.to(device, dtype) for each in inputs),
                    *(each.to(device) for each in (values_OI, scales_O, normal(_NUM_OUTPUTS).float())))


def _by_row(numbers: _Numbers) -> Tensor:
    """With a bias, and behind a norm (T, 2 O)."""
    ops = numbers.ops
    weight = ops.prepare_weight(Int8Weight(numbers.values_OI, numbers.scales_O))
    rows, _ = ops.add_rms_norm(numbers.x_TI, numbers.residual_TI, numbers.gain_I, _EPS, INT8)
    return torch.cat((ops.linear(numbers.x_TI, weight, numbers.bias_O), ops.linear(rows, weight, None)), 1)


def _by_one_scale(numbers: _Numbers) -> Tensor:
    """The same with inputs of one scale."""
    ops, x_TI = numbers.ops, numbers.x_TI

    def all_of(value: float, dtype: torch.dtype, count: int = 1) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=x_TI.device)

    shifts_O = (1000 * numbers.bias_O).int() - _INPUT_OFFSET * numbers.values_OI.cpu().sum(1).int().to(x_TI.device)
    prepared = ops.prepare_weight(Int8Weight(numbers.values_OI, numbers.scales_O))
    weight = StaticInt8Weight(prepared[0], shifts_O, numbers.scales_O * _INPUT_SCALE,
                              all_of(1 / _INPUT_SCALE, x_TI.dtype), all_of(_INPUT_OFFSET, x_TI.dtype))
    rounding = NormRounding(*(all_of(value, x_TI.dtype, _NUM_INPUTS) for value in (_INPUT_SCALE, _INPUT_OFFSET)))
    rows, _ = ops.add_rms_norm(x_TI, numbers.residual_TI, numbers.gain_I, _EPS, rounding)
    return torch.cat((ops.linear(x_TI, weight, None), ops.linear(rows, weight, None)), 1)


_MATMULS: dict[str, Callable[[_Numbers], Tensor]] = {INT8: _by_row, INT8_STATIC: _by_one_scale}


def why_no_replay(compiler: GraphCompiler, npu: Side, cpu: Side, needs: ModelNeeds) -> str | None:
    """The fault of captured graphs on this device, if any. `compiler` is made for the attention of `npu`."""
    layers = {side: DecodeLayer(side, needs) for side in (npu, cpu)}
    for layer in layers.values():
        layer.step((0, 0), (256, 256), seed=20)  # contexts of any length below
    graph = _Replayed(compiler, layers[npu])

    def replay(side: Side) -> Tensor:
        return torch.cat([graph.step(lens, 21 + number) if side is npu else layers[side].step(lens, (1, 1), 21 + number)
                          for number, lens in enumerate(_REPLAYED_LENS)])

    try:
        finding = _finding(replay, npu, cpu, "fails")
    finally:
        compiler.release()
    return None if finding is None else f"a captured graph, replayed with other context lengths, {finding}"


class _Replayed:
    """A layer's decode graph, over inputs that are written in place, as a runner's are."""

    def __init__(self, compiler: GraphCompiler, layer: DecodeLayer):
        self._compiler, self._layer = compiler, layer
        self._graph = compiler.compile(layer.forward, len(_REPLAYED_LENS[0]))
        self._inputs: StepInputs | None = None

    def step(self, done_lens: Sequence[int], seed: int) -> Tensor:
        inputs, context_lens, _ = step_inputs(self._layer.side, self._layer.needs, done_lens, (1, 1), seed)
        if self._inputs is None:
            self._inputs = inputs
        else:
            for kept, new in zip(self._inputs, inputs, strict=True):
                kept.copy_(new)
        torch.npu.synchronize()
        self._compiler.before_replay(len(context_lens), context_lens)
        return self._graph(self._inputs).cpu()
