"""Our attention kernels on CUDA at the sizes of Qwen3-8B, Qwen3-0.6B and Qwen3-VL: microseconds, GB/s, TFLOP/s.

    python scripts/bench_cuda_attention.py [--part decode prefill tower] [--fp8] [--sweep] [--against FOLDER]

`--against FOLDER`, platforms/cuda of another checkout: its attention runs beside ours, on the same tensors, and how far
the two are apart is said. All runs in Triton, too, and towers in torch's flash attention. `--fp8`: keys and values are
in e4m3. `--sweep` tries other tiles and numbers of parts of Triton's kernels, from which
platforms/cuda/attention/tiles.py is filled, and other shapes of the decode kernel. Times of decode attention are
those in a graph, as a decode step has it, the others' those of the kernels alone, as in bench_cuda_kernels.py; the
share is that of the read bandwidth, measured in the same run. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_common import commit, versions
from bench_cuda_kernels import DEVICE, Case, measure, report
from bench_device_bandwidth import measure_read_bandwidth
from torch import Tensor
from triton.runtime.errors import OutOfResources

from npu_runner.platforms import pick_platform
from npu_runner.platforms.cuda.attention import hopper_decode as decode_attention
from npu_runner.platforms.cuda.attention.backend import TritonAttention
from npu_runner.platforms.cuda.attention.tiles import AttentionTile as Tile
from npu_runner.platforms.step_inputs import AttentionMetadata

_BLOCK_SIZE = 64
_ROTATED_BYTES = 400 << 20
_DTYPE = torch.bfloat16
_PACKAGE = "npu_runner.platforms.cuda"


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim,
                "block_size": _BLOCK_SIZE, "dtype": _DTYPE}


MODELS = {"8b": Heads(32, 8, 128), "0.6b": Heads(16, 8, 128), "head 64": Heads(32, 8, 64),
          "head 256": Heads(16, 2, 256)}
Other = Callable[..., Any] | None
"""TritonAttention of another checkout."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    Contexts.dtype = torch.float8_e4m3fn if arguments.fp8 else _DTYPE
    pick_platform("cuda").devices.set_device(0)
    torch.manual_seed(0)
    other = load_attention(arguments.against) if arguments.against else None
    results = []
    with torch.inference_mode():
        gb_per_second, reader = measure_read_bandwidth(torch.device(DEVICE), 4 << 30)
        gb_per_second /= 1e9
        print(f"reads at {gb_per_second:.0f} GB/s ({reader})")
        for part in arguments.part:
            for case in PARTS[part](arguments.sweep, other):
                try:
                    result = measure(case)
                except OutOfResources as too_large:  # a tile that this GPU has no room for
                    print(f"{case.name:<46}{too_large}")
                    continue
                result["share_of_bandwidth"] = result["gb_per_second"] / gb_per_second
                results.append(result)
                print(f"{result['share_of_bandwidth']:>6.1%} {report(result)}", flush=True)
    print(json.dumps({"bench": "bench_cuda_attention", "commit": commit(), "device": torch.cuda.get_device_name(),
                      "read_gb_per_second": gb_per_second, "versions": versions("torch", "triton"),
                      "results": results}))


def load_attention(folder: Path) -> Callable[..., Any]:
    """TritonAttention of the files in `folder`, as modules of another name beside ours."""
    package = Path(tempfile.mkdtemp()) / "other_attention"
    package.mkdir()
    for path in (*folder.rglob("*.py"), *folder.rglob("*.cu")):
        copy = package / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace(_PACKAGE, package.name))
    sys.path.insert(0, str(package.parent))
    attention: Callable[..., Any] = importlib.import_module("other_attention.attention.backend").TritonAttention
    return attention


class Contexts:
    """Contexts of several layers in blocks out of order; `layers` take turns, so that none is in the L2 cache."""

    dtype = _DTYPE

    def __init__(self, heads: Heads, context_lens: list[int]):
        counts = [-(-length // _BLOCK_SIZE) for length in context_lens]
        shape = (1 + sum(counts), _BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        row_bytes = 2 * heads.num_kv_heads * heads.head_dim * self.dtype.itemsize
        self.num_bytes = sum(context_lens) * row_bytes
        num_layers = max(2, min(12, _ROTATED_BYTES // (shape[0] * _BLOCK_SIZE * row_bytes)))
        self.layers = [tuple(torch.randn(shape, device=DEVICE, dtype=_DTYPE).to(self.dtype) for _ in "kv")
                       for _ in range(num_layers)]
        self.tables_BW = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        order = (1 + torch.randperm(sum(counts))).int().split(counts)
        for row, blocks in enumerate(order):
            self.tables_BW[row, : len(blocks)] = blocks
        self.lens_B = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)

    def metadata(self, *, plan: Any = None, is_prefill: bool = False) -> AttentionMetadata:
        return AttentionMetadata(is_prefill, self.lens_B, self.lens_B, self.tables_BW.to(DEVICE), plan)


def decode(is_sweep: bool, other: Other) -> Iterator[Case]:
    """One token a sequence, contexts of one length and mixed as in a batch of text."""
    lengths = {**{f"{batch} x {length}": [length] * batch for length in (512, 2048) for batch in (1, 8, 32, 64, 256)},
               "256 mixed": _mixed(256), "64 mixed": _mixed(64), "32 mixed": _mixed(32)}
    for (model, heads), (kind, context_lens) in itertools.product(MODELS.items(), lengths.items()):
        if model in ("head 64", "head 256") and "mixed" not in kind:
            continue
        contexts = Contexts(heads, context_lens)
        metadata = contexts.metadata()
        q_BNH = torch.randn(len(context_lens), heads.num_heads, heads.head_dim, device=DEVICE, dtype=_DTYPE)

        def call_of(backend: Any, contexts: Any = contexts, metadata: Any = metadata, q_BNH: Any = q_BNH,
                    heads: Any = heads) -> Callable[[int], Any]:
            return lambda index: backend.decode(q_BNH, *contexts.layers[index % len(contexts.layers)], metadata,
                                                heads.head_dim**-0.5)

        ours = TritonAttention(**heads.settings)
        name = f"decode {model}, {kind}"
        work = {"num_bytes": contexts.num_bytes, "in_graph": True}
        yield from _both(name, call_of, ours, other, heads, **work)
        if ours.decodes is not None:
            with _changed(ours, decodes=None):
                yield Case(name=f"{name}, in Triton", call=call_of(ours), **work)
        if is_sweep and ("mixed" in kind or kind in ("1 x 2048", "8 x 512")):
            yield from _decode_sweep(heads, len(context_lens), ours, call_of, work)


def _decode_sweep(heads: Heads, batch_size: int, ours: Any, call_of: Callable[..., Any],
                  work: dict[str, Any]) -> Iterator[Case]:
    is_fp8 = Contexts.dtype != _DTYPE
    for shape in itertools.product((1, 2, 4), (4, 8), (1, 2, 3), (2, 4)) if ours.decodes is not None else ():
        if math.prod(shape[:3]) > 32 or shape[1] * shape[2] > 16:  # too many registers
            continue
        with _changed(decode_attention, SHAPES={is_fp8: decode_attention.Shape(*shape)}):
            yield Case(name=f"  tiles, warps, programs, least steps {shape}",
                       call=call_of(TritonAttention(**heads.settings)), **work)
    for tile, num_parts in _decode_choices(heads, batch_size):
        name = "decode_tile_of_fp8" if is_fp8 else "decode_tile"
        with _changed(ours, decodes=None, num_parts=lambda _, num_parts=num_parts: num_parts, **{name: tile}):
            yield Case(name=f"  {tuple(tile)[1:]} parts {num_parts}", call=call_of(ours), **work)


def _mixed(count: int) -> list[int]:
    draw = random.Random(1)
    return [draw.randint(100, 1024) + 60 for _ in range(count)]


def _decode_choices(heads: Heads, batch_size: int) -> Iterator[tuple[Tile, int]]:
    programs = batch_size * heads.num_kv_heads
    all_parts = [parts for parts in (1, 2, 4, 8, 16, 32) if 256 <= programs * parts <= 8192]
    wide = heads.head_dim == 256
    tiles = [(c, w, s) for c in ((16, 32, 64) if wide else (32, 64)) for w in (2, 4) for s in (2, 3, 4)]
    for (columns, num_warps, num_stages), parts in itertools.product(tiles, all_parts):
        yield Tile(16, columns, num_warps, num_stages), parts


def prefill(is_sweep: bool, other: Other) -> Iterator[Case]:
    """Steps of 8,192 tokens: whole prompts of one length, a long one's last chunk."""
    steps = {"13 x 630": ([0] * 13, [630] * 13), "16 mixed": ([0] * 16, _mixed(16)), "2 x 4096": ([0] * 2, [4096] * 2),
             "4 x 4000": ([0] * 4, [4000] * 4), "8192": ([0], [8192]), "8192 behind 8192": ([8192], [8192]),
             "8192 behind 24576": ([24576], [8192])}
    for (model, heads), (kind, (cached_lens, query_lens)) in itertools.product(MODELS.items(), steps.items()):
        if model != "8b" and kind not in ("16 mixed", "2 x 4096"):
            continue
        context_lens = [cached + new for cached, new in zip(cached_lens, query_lens, strict=True)]
        contexts = Contexts(heads, context_lens)
        q_TNH = torch.randn(sum(query_lens), heads.num_heads, heads.head_dim, device=DEVICE, dtype=_DTYPE)
        seen = sum(new * cached + new * (new + 1) / 2 for cached, new in zip(cached_lens, query_lens, strict=True))

        def call_of(backend: Any, contexts: Any = contexts, q_TNH: Any = q_TNH, heads: Any = heads,
                    lens: Any = (query_lens, context_lens)) -> Callable[[int], Any]:
            plan = backend.plan_prefill(*lens, contexts.tables_BW.numpy(), DEVICE)
            metadata = contexts.metadata(plan=plan, is_prefill=True)
            return lambda index: backend.prefill(q_TNH, *contexts.layers[index % len(contexts.layers)], metadata,
                                                 heads.head_dim**-0.5)

        ours = TritonAttention(**heads.settings)
        work = {"num_bytes": contexts.num_bytes, "operations": 4.0 * seen * heads.num_heads * heads.head_dim}
        name = f"prefill {model}, {kind}"
        yield from _both(name, call_of, ours, other, heads, **work)
        with _changed(ours, prompts=None):
            yield Case(name=f"{name}, in Triton", call=call_of(ours), **work)
        for tile in _prefill_choices() if is_sweep and model != "0.6b" and kind in ("13 x 630", "2 x 4096") else ():
            with _changed(ours, prefill_tile=tile, prompts=None):
                yield Case(name=f"  {tuple(tile)}", call=call_of(ours), **work)


def _prefill_choices() -> Iterator[Tile]:
    for rows, columns, stages in itertools.product((64, 128), (32, 64), (2, 3, 4)):
        yield Tile(rows, columns, rows // 16, stages)


def tower(is_sweep: bool, other: Other) -> Iterator[Case]:
    """14 images of 896 x 672 as Qwen3-VL sees them, mixed ones, and windows of Qwen2.5-VL's size."""
    from npu_runner.platforms.cuda.attention import backend as attention

    images = {"14 x 2352": [2352] * 14, "mixed": [2352, 300, 4096, 1024, 700, 64, 9000, 2352, 5000, 1200],
              "512 x 64": [64] * 512}
    for (head_dim, num_heads), (kind, lengths) in itertools.product({64: 16, 72: 16, 80: 16, 128: 16}.items(),
                                                                  images.items()):
        if kind == "512 x 64" and head_dim != 80:
            continue
        heads = Heads(num_heads, num_heads, head_dim)
        qkv = torch.randn(sum(lengths), 3, num_heads, head_dim, device=DEVICE, dtype=_DTYPE)

        def call_of(backend: Any, qkv: Tensor = qkv, lengths: Any = lengths) -> Callable[[int], Any]:
            plan = backend.plan_vision(lengths, DEVICE)
            return lambda _: backend.vision(*qkv.unbind(1), plan, qkv.shape[-1]**-0.5)

        ours = TritonAttention(**heads.settings)
        work = {"num_bytes": 4 / 3 * qkv.nbytes,
                "operations": 4.0 * sum(length**2 for length in lengths) * num_heads * head_dim}
        name = f"tower {head_dim}, {kind}"
        yield from _both(name, call_of, ours, other, heads, **work)
        with _changed(ours.images, takes=lambda *_: False):
            yield Case(name=f"{name}, in Triton", call=call_of(ours), **work)
        yield Case(name=f"{name}, torch's flash", call=_torch_flash(qkv, lengths), **work)
        for tile in _tower_choices() if is_sweep and head_dim in (64, 72) else ():
            with (_changed(attention, tower_tile=lambda *_, tile=tile: tile, SPLIT_TOWER=tile),
                  _changed(ours.images, takes=lambda *_: False)):
                yield Case(name=f"  {tuple(tile)}", call=call_of(ours), **work)


def _tower_choices() -> Iterator[Tile]:
    for rows, columns, stages in itertools.product((64, 128), (32, 64, 128), (2, 3)):
        for num_warps in {4, rows // 16}:
            yield Tile(rows, columns, num_warps, stages)


def _torch_flash(qkv: Tensor, lengths: list[int]) -> Callable[[int], Any]:
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return lambda _: varlen_attn(*qkv.unbind(1), starts, starts, max(lengths), max(lengths))


def _both(name: str, call_of: Callable[..., Any], ours: Any, other: Other, heads: Heads, **work: Any) -> Iterator[Case]:
    yield Case(name=name, call=call_of(ours), **work)
    if other is not None:
        theirs = other(**heads.settings)
        found, expected = (call_of(backend)(0).float() for backend in (ours, theirs))
        error = float((found - expected).norm() / expected.norm())
        yield Case(name=f"{name}, other (apart {error:.0e})", call=call_of(theirs), **work)


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """`values` in the place of the owner's own, while a case of this run is measured."""
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


PARTS: dict[str, Callable[[bool, Other], Iterator[Case]]] = {"decode": decode, "prefill": prefill, "tower": tower}

if __name__ == "__main__":
    main()
