"""The one place that imports torchair, the compiler inside torch_npu. Knows nothing of models.

Importing torchair (or its sibling npugraph_ex) takes SIGINT and SIGTERM away from whoever had them; here they are given
back.
"""

from __future__ import annotations

import functools
import importlib
import signal
import threading
from typing import Any

import torch

# Writing into the paged cache is missing from torchair's list of operators that may stay in place: as shipped it copies
# the whole cache out and in again, for every layer of every step. The numbers are the arguments that are written.
_WRITES_IN_PLACE = ("npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache", [2, 3])

_LAYOUT_TND = 4
_CACHE_MODE = "Norm"


@functools.cache
def load(name: str) -> Any:
    """The module `torchair` or `npugraph_ex`, told which operators write in place."""
    module = _import(name)
    if name == "torchair":
        # Registers torch.ops.air.npu_fused_infer_attention_score, whose lengths are tensors. torchair itself imports it
        # when its wrapper is called, which is too late: that is inside a trace.
        _import("torchair.ops._npu_fused_infer_attention_score")
        _convert_rotary_in_place(module)
        _convert_cache_writes(module)
    passes = _import(f"{name}._acl_concrete_graph.graph_pass")
    functional, in_place, arguments = _WRITES_IN_PLACE
    passes.register_inplaceable_npu_op(functional, in_place, mutated_arg=arguments)
    return module


def _convert_rotary_in_place(module: Any) -> None:
    """Let GE turn q and k where they are. As shipped both are copied first, in case somebody else reads them.

    Nobody does here: NpuOps.rotary gets them fresh from a norm or from the split of the qkv product.
    """
    apis = _import("torchair._ge_concrete_graph.ge_apis")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.custom.apply_rotary_pos_emb")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_apply_rotary_pos_emb.default)
    def convert(query: Any, key: Any, cos: Any, sin: Any, layout: str = "BSND", rotary_mode: str = "half",
                meta_outputs: Any = None) -> Any:
        assert layout == "TND", f"layout {layout} is not what NpuOps.rotary asks for"
        return apis.ApplyRotaryPosEmb(query, key, cos, sin, layout=_LAYOUT_TND, rotary_mode=rotary_mode)


def _convert_cache_writes(module: Any) -> None:
    """Let GE write the cache in the layout that is asked for. The converter of some wheels knows no cache_mode and
    writes PA_NZ, which attention then reads as if it were not: wrong answers, without an error.
    """
    apis = _import("torchair._ge_concrete_graph.ge_apis")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.custom.npu_scatter_pa_kv_cache")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_scatter_pa_kv_cache_functional.default)
    def convert(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *, compress_lens: Any = None,
                compress_seq_offsets: Any = None, seq_lens: Any = None, cache_mode: str = "PA_NZ",
                meta_outputs: Any = None) -> Any:
        assert cache_mode == _CACHE_MODE, f"cache_mode {cache_mode} is not what NpuAttention.write_kv asks for"
        # The functional form returns new caches; torchair drops the moves where the graph's own are written.
        caches = (apis.TensorMove(key_cache), apis.TensorMove(value_cache))
        # By place: some wheels call the seventh compress_seq_offset.
        return apis.ScatterPaKvCache(key, caches[0], slot_mapping, value, caches[1], compress_lens,
                                     compress_seq_offsets, seq_lens, cache_mode=cache_mode, scatter_mode="None",
                                     strides=[1, 1], offsets=[0, 0])


def has_npugraph_ex() -> bool:
    """Whether this torch_npu has the backend that follows torchair's reduce-overhead mode."""
    try:
        _import("npugraph_ex")
    except ImportError:
        return False
    return True


def _import(name: str) -> Any:
    import torch_npu.dynamo  # noqa: F401 - makes `torchair` and `npugraph_ex` importable by these names

    if threading.current_thread() is not threading.main_thread():
        return importlib.import_module(name)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return importlib.import_module(name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
