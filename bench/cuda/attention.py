"""Our attention kernels at the sizes of Qwen3-8B, Qwen3-0.6B and Qwen3-VL: decode steps, prompts, vision towers."""
# ruff: noqa: B023  A case is measured before its loop goes on.

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cuda.cases import DEVICE, Case, changed, rotate
from npu_runner.platforms.cuda.attention.backend import TritonAttention
from npu_runner.platforms.step_inputs import AttentionMetadata

_BLOCK_SIZE = 64
_ROTATED_BYTES = 400 << 20
_DTYPE, _FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def backend(self) -> TritonAttention:
        return TritonAttention(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                               block_size=_BLOCK_SIZE, dtype=_DTYPE)

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.num_heads, self.head_dim, device=DEVICE, dtype=_DTYPE)


MODELS = {"8b": Heads(32, 8, 128), "0.6b": Heads(16, 8, 128), "head 64": Heads(32, 8, 64),
          "head 256": Heads(16, 2, 256)}


class Contexts:
    """Contexts of several layers in blocks out of order."""

    def __init__(self, heads: Heads, context_lens: list[int], dtype: torch.dtype):
        counts = [-(-length // _BLOCK_SIZE) for length in context_lens]
        shape = (1 + sum(counts), _BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        row_bytes = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
        self.num_bytes = sum(context_lens) * row_bytes
        num_layers = max(2, min(12, _ROTATED_BYTES // (shape[0] * _BLOCK_SIZE * row_bytes)))
        self.layers = [tuple(torch.randn(shape, device=DEVICE, dtype=_DTYPE).to(dtype) for _ in "kv")
                       for _ in range(num_layers)]
        self.tables_BW = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        for row, blocks in enumerate((1 + torch.randperm(sum(counts))).int().split(counts)):
            self.tables_BW[row, : len(blocks)] = blocks
        self.lens_B = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)

    def metadata(self, *, plan: Any = None, is_prefill: bool = False) -> AttentionMetadata:
        return AttentionMetadata(is_prefill, self.lens_B, self.lens_B, self.tables_BW.to(DEVICE), plan)


def _mixed(count: int) -> list[int]:
    """Lengths as in a batch of text."""
    draw = random.Random(1)
    return [draw.randint(100, 1024) + 60 for _ in range(count)]


def decode(arguments: Namespace) -> Iterator[Case]:
    """One token a sequence, contexts of one length and mixed."""
    lengths = {**{f"{batch} x {length}": [length] * batch for length in (512, 2048) for batch in (1, 8, 32, 64, 256)},
               "256 mixed": _mixed(256), "64 mixed": _mixed(64), "32 mixed": _mixed(32)}
    for (model, heads), (kind, context_lens) in itertools.product(MODELS.items(), lengths.items()):
        if model in ("head 64", "head 256") and "mixed" not in kind:
            continue
        contexts = Contexts(heads, context_lens, _FP8 if arguments.fp8 else _DTYPE)
        metadata, q_BNH = contexts.metadata(), heads.queries(len(context_lens))

        def call_of(backend: Any) -> Callable[[int], Any]:
            return rotate(lambda kv: backend.decode(q_BNH, *kv, metadata, heads.head_dim**-0.5), contexts.layers)

        ours, name = heads.backend(), f"decode {model}, {kind}"
        work = {"num_bytes": contexts.num_bytes, "in_graph": True}
        yield Case(name=name, call=call_of(ours), **work)
        if ours.decodes is not None:
            with changed(ours, decodes=None):
                yield Case(name=f"{name}, in Triton", call=call_of(ours), **work)


def prefill(arguments: Namespace) -> Iterator[Case]:
    """Steps of 8,192 tokens: whole prompts of one length, a long one's last chunk."""
    steps = {"13 x 630": ([0] * 13, [630] * 13), "16 mixed": ([0] * 16, _mixed(16)), "2 x 4096": ([0] * 2, [4096] * 2),
             "4 x 4000": ([0] * 4, [4000] * 4), "8192": ([0], [8192]), "8192 behind 8192": ([8192], [8192]),
             "8192 behind 24576": ([24576], [8192])}
    for (model, heads), (kind, (cached_lens, query_lens)) in itertools.product(MODELS.items(), steps.items()):
        if model != "8b" and kind not in ("16 mixed", "2 x 4096"):
            continue
        context_lens = [cached + new for cached, new in zip(cached_lens, query_lens, strict=True)]
        contexts = Contexts(heads, context_lens, _FP8 if arguments.fp8 else _DTYPE)
        q_TNH = heads.queries(sum(query_lens))
        seen = sum(new * cached + new * (new + 1) / 2 for cached, new in zip(cached_lens, query_lens, strict=True))

        def call_of(backend: Any) -> Callable[[int], Any]:
            plan = backend.plan_prefill(query_lens, context_lens, contexts.tables_BW.numpy(), DEVICE)
            metadata = contexts.metadata(plan=plan, is_prefill=True)
            return rotate(lambda kv: backend.prefill(q_TNH, *kv, metadata, heads.head_dim**-0.5), contexts.layers)

        ours, name = heads.backend(), f"prefill {model}, {kind}"
        work = {"num_bytes": contexts.num_bytes, "operations": 4.0 * seen * heads.num_heads * heads.head_dim}
        yield Case(name=name, call=call_of(ours), **work)
        with changed(ours, prompts=None):
            yield Case(name=f"{name}, in Triton", call=call_of(ours), **work)


def tower(_: Namespace) -> Iterator[Case]:
    """14 images of 896 x 672 as Qwen3-VL sees them, mixed ones, and windows of Qwen2.5-VL's size."""
    images = {"14 x 2352": [2352] * 14, "mixed": [2352, 300, 4096, 1024, 700, 64, 9000, 2352, 5000, 1200],
              "512 x 64": [64] * 512}
    num_heads = 16
    for head_dim, (kind, lengths) in itertools.product((64, 72, 80, 128), images.items()):
        if kind == "512 x 64" and head_dim != 80:
            continue
        qkv = torch.randn(sum(lengths), 3, num_heads, head_dim, device=DEVICE, dtype=_DTYPE)
        ours: Any = Heads(num_heads, num_heads, head_dim).backend()
        name = f"tower {head_dim}, {kind}"
        plan = ours.plan_vision(lengths, DEVICE)
        case = Case(name=name, num_bytes=4 / 3 * qkv.nbytes,
                    operations=4.0 * sum(length**2 for length in lengths) * num_heads * head_dim,
                    call=lambda _: ours.vision(*qkv.unbind(1), plan, head_dim**-0.5))
        yield case
        work: dict[str, Any] = {"num_bytes": case.num_bytes, "operations": case.operations}
        with changed(ours.images, takes=lambda *_: False):
            plan = ours.plan_vision(lengths, DEVICE)
            yield Case(name=f"{name}, in Triton", call=case.call, **work)
        yield Case(name=f"{name}, torch's flash", call=_torch_flash(qkv, lengths), **work)


def _torch_flash(qkv: Tensor, lengths: list[int]) -> Callable[[int], Any]:
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return lambda _: varlen_attn(*qkv.unbind(1), starts, starts, max(lengths), max(lengths))
