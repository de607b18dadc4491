"""What stands beside attention in a dense decoder's step: the general operators, and the kernels in their place."""
# ruff: noqa: B023  A case is measured before its loop goes on.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cuda.cases import CALLS, DEVICE, Case, rotate
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.cuda.attention.backend import TritonAttention
from npu_runner.platforms.cuda.matmul import (
    grouped,
    hopper_fp8,
    hopper_grouped_small_m,
    hopper_small_m,
    library,
    quantised,
    small_m,
)
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.matmul.quantised_inputs import quantise_rows
from npu_runner.platforms.cuda.ops import TritonOps
from npu_runner.platforms.cuda.sampling.sample import sample_from_softmax
from npu_runner.platforms.grouped import GroupedWeight
from npu_runner.platforms.ops import HeadNorms
from npu_runner.sampling import sampling_ops

_VOCABULARY = 151_936
# (query heads, kv heads, head dim, dims that turn, a gate beside each query) of Qwen3-0.6B, Qwen3-8B, Qwen3.5-35B-A3B
_HEADS = {"0.6b": (16, 8, 128, 128, False), "8b": (32, 8, 128, 128, False), "35b-a3b": (16, 2, 256, 64, True)}
_BLOCK_SIZE = 64
# (output, input features) of Qwen3-8B's weights and of Qwen3-0.6B's
_LAYER = {"8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b gate_up": (24_576, 4096), "8b down": (4096, 12_288)}
_WEIGHTS = {**_LAYER, "8b head": (_VOCABULARY, 4096), "0.6b qkv": (4096, 1024), "0.6b o": (1024, 2048),
            "0.6b gate_up": (6144, 1024), "0.6b down": (1024, 3072), "0.6b head": (_VOCABULARY, 1024)}
_NUM_WEIGHTS = sum(outputs * inputs for outputs, inputs in _LAYER.values())


def draws(_: Namespace) -> Iterator[Case]:
    """A token of each row from bfloat16 logits: sampled, or the most probable."""
    for batch_size in (1, 8, 64, 256):
        layers = [torch.randn(batch_size, _VOCABULARY, device=DEVICE).mul_(3).bfloat16() for _ in range(3)]
        uniforms_B1 = torch.rand(batch_size, 1, device=DEVICE)
        for kind, temperature in (("draw", 0.6), ("greedy", 0.0)):
            temperature_B1 = torch.full((batch_size, 1), temperature, device=DEVICE)
            ways: dict[str, Callable[[Tensor], Any]] = {
                "operators": (lambda x: _plain_draw(x, temperature_B1, uniforms_B1)) if temperature
                else sampling_ops.most_probable,
                "kernels": lambda x: sample_from_softmax(x, temperature_B1, uniforms_B1)}
            for way, run in ways.items():
                yield Case(name=f"{kind} of {batch_size}, {way}", call=rotate(run, layers), in_graph=True,
                           num_bytes=2.0 * batch_size * _VOCABULARY)


def _plain_draw(logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor) -> Tensor:
    """The sampler's operators where a platform has no kernel for a draw."""
    largest_B1, tokens_B1 = sampling_ops.most_probable(logits_BV)
    unusable_B1 = sampling_ops.is_unusable(logits_BV, largest_B1)
    weights_BV = sampling_ops.token_weights(logits_BV.float(), largest_B1.float(), temperature_B1)
    return sampling_ops.sample(weights_BV, tokens_B1, uniform_B1, min_p_B1=None).masked_fill(unusable_B1, -1)


def heads(_: Namespace) -> Iterator[Case]:
    """Norm, rotary embedding and cache write of the heads of a step, or of a prompt."""
    for model, shape in _HEADS.items():
        for num_tokens in (1, 8, 64, 256, 8192):
            layers = [_Heads(num_tokens, *shape) for _ in range(CALLS if num_tokens <= 256 else 3)]
            for way, run in (("operators", AttentionBackend.norm_rotary_store),
                             ("kernel", TritonAttention.norm_rotary_store)):
                yield Case(name=f"heads of {model}, {num_tokens} tokens, {way}", in_graph=True,
                           call=rotate(lambda layer: layer.store(run), layers), num_bytes=layers[0].num_bytes)


class _Heads:
    """One layer's queries, keys and values of a step, and the layer's cache."""

    def __init__(self, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int,
                 is_gated: bool):
        width = (1 + is_gated) * head_dim
        sizes = [num_heads * width, num_kv_heads * head_dim, num_kv_heads * head_dim]
        qkv = torch.randn(num_tokens, sum(sizes), device=DEVICE).bfloat16()
        q, k, v = qkv.split(sizes, dim=-1)
        self.heads = [q.unflatten(-1, (-1, width))[..., :head_dim], *(x.unflatten(-1, (-1, head_dim)) for x in (k, v))]
        gain_H = torch.ones(head_dim, device=DEVICE, dtype=torch.bfloat16)
        self.norms = HeadNorms(gain_H, gain_H, 1e-6)
        self.turns = [torch.randn(num_tokens, rotary_dim, device=DEVICE).bfloat16() for _ in range(2)]
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        k_cache, v_cache = torch.zeros(2, num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim, device=DEVICE,
                                       dtype=torch.bfloat16)
        self.cache = {"k_cache": k_cache, "v_cache": v_cache,
                      "slot_mapping_T": torch.randperm(num_blocks * _BLOCK_SIZE, device=DEVICE)[:num_tokens].int()}
        self.backend = TritonAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                                       block_size=_BLOCK_SIZE, dtype=torch.bfloat16)
        self.ops = TritonOps()
        self.num_bytes = 2.0 * 2 * num_tokens * head_dim * (num_heads + 2 * num_kv_heads)

    def store(self, run: Any) -> Tensor:
        q_TNH: Tensor = run(self.backend, self.ops, *self.heads, self.norms, *self.turns, **self.cache)
        return q_TNH


def matmul(_: Namespace) -> Iterator[Case]:
    """A few rows times a weight in bfloat16, by the library and by the kernels."""
    for name, (num_outputs, num_inputs) in _WEIGHTS.items():
        weights = [torch.randn(num_outputs, num_inputs, device=DEVICE, dtype=torch.bfloat16) * num_inputs**-0.5
                   for _ in range(2 if num_outputs == _VOCABULARY else CALLS)]
        for num_rows in (1, 2, 4, 8, 16):
            x_MI = torch.randn(num_rows, num_inputs, device=DEVICE).bfloat16()
            matmuls = [Matmul(x_MI, weight, None, torch.bfloat16) for weight in weights]
            ways: dict[str, Callable[[Matmul], Tensor]] = {"library": lambda matmul: F.linear(*matmul[:3]),
                                                           "triton": small_m.multiply}
            if hopper_small_m.accepts(matmuls[0]):
                ways["CUDA C++"] = hopper_small_m.multiply
            for way, run in ways.items():
                yield Case(name=f"{name}, {num_rows} rows, {way}", call=rotate(run, matmuls), in_graph=True,
                           num_bytes=2.0 * num_outputs * num_inputs,
                           operations=2.0 * num_rows * num_outputs * num_inputs)


def rows(_: Namespace) -> Iterator[Case]:
    """The four weights of a layer of Qwen3-8B in FP8 one behind the other, as one call: by the library, by the kernels
    in Triton up to their most rows, by those in CUDA C++ (Hopper)."""
    for in_blocks in (False, True):
        layers = [[_weight(*shape, in_blocks) for shape in _LAYER.values()] for _ in range(3)]
        for num_rows in (1, 2, 8, 16, 32, 64, 96, 128, 192):
            inputs = {width: quantise_rows(torch.randn(num_rows, width, device=DEVICE).bfloat16(), torch.float8_e4m3fn,
                                           in_groups=in_blocks) for _, width in _LAYER.values()}
            limits = {"triton": (1, quantised.MOST_M), "few rows": (1, hopper_small_m.MOST_M),
                      "hopper": hopper_fp8.LIMITS[in_blocks]}
            for way, run in _WAYS.items():
                least, most = limits.get(way, (1, num_rows))
                if least <= num_rows <= most:
                    yield Case(name=f"{'block' if in_blocks else 'row'}, {num_rows} rows, {way}", in_graph=True,
                               call=rotate(lambda layer: [run(_fp8_matmul(inputs[weight.shape[1]], weight, scale))
                                                          for weight, scale in layer], layers),
                               num_bytes=float(_NUM_WEIGHTS), operations=2.0 * num_rows * _NUM_WEIGHTS)


def _weight(num_outputs: int, num_inputs: int, in_blocks: bool) -> tuple[Tensor, Tensor]:
    weight_OI = torch.randn(num_outputs, num_inputs, device=DEVICE).mul_(40).to(torch.float8_e4m3fn)
    scales = (num_outputs // 128, num_inputs // 128) if in_blocks else (num_outputs,)
    return weight_OI, torch.full(scales, 1e-3, device=DEVICE)


def _fp8_matmul(rows: tuple[Tensor, Tensor], weight_OI: Tensor, scale: Tensor) -> Matmul:
    return Matmul(rows[0], weight_OI, None, torch.bfloat16, rows[1], scale)


_WAYS: dict[str, Callable[[Matmul], Tensor]] = {
    "library": library.multiply, "triton": quantised.multiply, "few rows": hopper_small_m.multiply,
    "hopper": hopper_fp8.multiply,
}


def int4(_: Namespace) -> Iterator[Case]:
    """The same weights in 4 bits, groups of 128 without zeros: in Triton and, on Hopper, in CUDA C++."""
    layers = [[_grouped_weight(*shape) for shape in _LAYER.values()] for _ in range(6)]
    num_bytes = float(sum(weight.values.nbytes + weight.scales.nbytes for weight in layers[0]))
    for num_rows in (1, 2, 4, 8, 16):
        inputs = [torch.randn(num_rows, width, device=DEVICE).bfloat16() for _, width in _LAYER.values()]
        ways: dict[str, Callable[[Matmul], Tensor]] = {"triton": _grouped_in_triton}
        if all(hopper_grouped_small_m.accepts(_grouped_matmul(x, weight))
               for x, weight in zip(inputs, layers[0], strict=True)):
            ways["CUDA C++"] = hopper_grouped_small_m.multiply
        for way, run in ways.items():
            yield Case(name=f"4 bits, {num_rows} rows, {way}", in_graph=True, num_bytes=num_bytes,
                       call=rotate(lambda layer: [run(_grouped_matmul(*pair))
                                                  for pair in zip(inputs, layer, strict=True)], layers),
                       operations=2.0 * num_rows * _NUM_WEIGHTS)


def _grouped_weight(num_outputs: int, num_inputs: int) -> GroupedWeight:
    values = torch.randint(0, 256, (num_outputs, num_inputs // 2), device=DEVICE, dtype=torch.uint8)
    scales = torch.rand(num_outputs, num_inputs // 128, device=DEVICE).bfloat16() * 1e-2
    return grouped.lay_out(GroupedWeight(values, scales, None))


def _grouped_matmul(x: Tensor, weight: GroupedWeight) -> Matmul:
    return Matmul(x, weight, None, torch.bfloat16)


def _grouped_in_triton(matmul: Matmul) -> Tensor:
    x, weight = matmul[:2]
    out = x.new_empty(len(x), weight.scales.shape[1])
    grouped.multiply_small_m(matmul, out)
    return out
