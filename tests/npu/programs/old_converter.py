"""Writes a paged cache in a GE graph as under a torch_npu whose own converter knows no cache_mode, and reads it back.

    python -m tests.npu.programs.old_converter [shipped]

With "shipped" the old converter is the one in use. The converter is put back as those wheels have it: no cache_mode,
PA_NZ written into the graph.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch_npu
from torch import Tensor

SHIPPED = "torchair._ge_concrete_graph.ge_converter.custom.npu_scatter_pa_kv_cache"


def put_back_the_old_converter() -> None:
    importlib.import_module("torch_npu.dynamo")  # makes the name torchair importable
    torchair, apis = (importlib.import_module(name) for name in ("torchair", "torchair._ge_concrete_graph.ge_apis"))
    importlib.import_module(SHIPPED)

    @torchair.register_fx_node_ge_converter(torch.ops.npu.npu_scatter_pa_kv_cache_functional.default)
    def convert(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *, compress_lens: Any = None,
                compress_seq_offset: Any = None, seq_lens: Any = None, meta_outputs: Any = None) -> Any:
        caches = apis.TensorMove(key_cache), apis.TensorMove(value_cache)
        return apis.ScatterPaKvCache(key, caches[0], slot_mapping, value, caches[1], compress_lens, compress_seq_offset,
                                     seq_lens, cache_mode="PA_NZ", scatter_mode="None", strides=[1, 1], offsets=[0, 0])


def write(key: Tensor, cache: Tensor, other: Tensor, slots: Tensor) -> Tensor:
    torch_npu.npu_scatter_pa_kv_cache(key, key + 1, cache, other, slots, cache_mode="Norm")
    return key * 2


def main(*arguments: str) -> None:
    put_back_the_old_converter()
    if "shipped" in arguments:
        import torchair
    else:
        from npu_runner.platforms.npu.torchair import load

        torchair = load("torchair")
    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    compiled = torch.compile(write, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)
    key = torch.arange(2 * 2 * 32, dtype=torch.float32).view(2, 2, 32)
    cache, other = (torch.zeros(2, 16, 2, 32).npu() for _ in range(2))
    with torch.inference_mode():
        compiled(key.npu(), cache, other, torch.tensor([3, 17], dtype=torch.int32).npu())
    for held, wanted in ((cache, key), (other, key + 1)):
        assert torch.equal(held.cpu()[[0, 1], [3, 1]], wanted), "the cache does not hold what was written"
    print("AS ASKED")


if __name__ == "__main__":
    main(*sys.argv[1:])
