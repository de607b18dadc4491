"""The one place that imports torchair, the compiler inside torch_npu. Knows nothing of models.

Importing torchair (or its sibling npugraph_ex) replaces the handlers of SIGINT and SIGTERM; they are restored here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import signal
import threading
from types import SimpleNamespace
from typing import Any

import torch

_LAYOUT_BSND = 1
_CACHE_MODE = "Norm"
# Places of tokens stand token by token, as npu_moe_init_routing_v2 gives them.
_BY_TOKEN = 2
_GE_FLOAT32 = 0


@functools.cache
def load(name: str) -> Any:
    """The module `torchair` or `npugraph_ex`, with our converters and operators that write in place."""
    module = _import(name)
    if name == "torchair":
        # Registers torch.ops.air.npu_fused_infer_attention_score, whose lengths are tensors. torchair itself imports it
        # when its wrapper is called, which is too late: that is inside a trace.
        _import("torchair.ops._npu_fused_infer_attention_score")
        _convert_rotary_in_place(module)
        _convert_cache_writes(module)
        _convert_experts(module)
        _convert_rounding_norm(module)
        _convert_rounding_experts(module)
        _convert_softplus(module)
        _convert_state_writes(module)
    else:
        _allow_grouped_integers(module)
    passes = _import(f"{name}._acl_concrete_graph.graph_pass")
    # Writing into caches and states is missing from torchair's list of operators that may stay in place: as shipped it
    # copies all of them out and in again, for every layer of every step. Numbers are the arguments that are written.
    passes.register_inplaceable_npu_op("npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache",
                                       mutated_arg=[2, 3])
    _define_rule_in_list()
    passes.register_inplaceable_npu_op("npu_recurrent_gated_delta_rule_functional",
                                       "npu_recurrent_gated_delta_rule_in_list", mutated_arg=[3])
    return module


def _allow_grouped_integers(package: Any) -> None:
    """Where a graph has npu_weight_quant_batchmatmul, npugraph_ex of torch_npu 2.13 turns off an option of torchair's
    that its own settings lack, and ends the compilation. It gets something to turn off."""
    with contextlib.suppress(AttributeError):  # a wheel without such settings has none to mend
        settings = operator.attrgetter("CompilerConfig")(package)
        if not hasattr(settings, "experimental_config"):
            settings.experimental_config = SimpleNamespace()


@functools.cache
def _define_rule_in_list() -> torch.library.Library:
    """The recurrent gated delta rule in place, with its output in a list.

    torchair replaces the functional operator by the one in place, and does not change readers of its first output. The
    wheel's own operator in place returns no tuple, so they would read its first row.
    """
    library = torch.library.Library("npu", "FRAGMENT")
    name = "npu_recurrent_gated_delta_rule_in_list"
    library.define(f"{name}(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
                   "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
                   "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor[]")

    def run(query: Any, key: Any, value: Any, state: Any, **more: Any) -> list[torch.Tensor]:
        return [torch.ops.npu.npu_recurrent_gated_delta_rule(query, key, value, state, **more)]

    for key in ("PrivateUse1", "Meta"):
        library.impl(name, run, key)
    return library


def _convert_rotary_in_place(module: Any) -> None:
    """Let GE rotate q and k in place. As shipped both are copied first, in case another operator reads them.

    None does here: NpuOps.rotary gets them fresh from a norm or from the split of the qkv matmul.
    """
    apis = _import("torchair._ge_concrete_graph.ge_apis")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.custom.apply_rotary_pos_emb")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_apply_rotary_pos_emb.default)
    def convert(query: Any, key: Any, cos: Any, sin: Any, layout: str = "BSND", rotary_mode: str = "half",
                meta_outputs: Any = None) -> Any:
        assert layout == "BSND", f"layout {layout} is not what NpuOps.rotary asks for"
        return apis.ApplyRotaryPosEmb(query, key, cos, sin, layout=_LAYOUT_BSND, rotary_mode=rotary_mode)


def _convert_cache_writes(module: Any) -> None:
    """Let GE write the cache in the requested layout. The converter of some wheels knows no cache_mode and writes
    PA_NZ, which attention then reads as if it were not: wrong answers, without an error.
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


def _convert_experts(module: Any) -> None:
    """Two operators of mixtures of experts for GE. In every wheel, the shipped converter of the router calls an API
    that takes no `renorm`, and fails. The right API cannot be called at all, so GE's operator is named here. The sum
    over a token's experts has no converter; GE's operator for it is another one.
    """
    apis, ge = _import("torchair._ge_concrete_graph.ge_apis"), _import("torchair.ge")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.custom.npu_moe_gating_top_k_softmax_v2")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default)
    def convert_router(x: Any, *, k: int = 1, finished: Any = None, renorm: int = 0, output_softmax: bool = False,
                       meta_outputs: Any = None) -> Any:
        return ge.custom_op("MoeGatingTopKSoftmaxV2", inputs={"x": x, "finished": finished},
                            outputs=["y", "expert_idx", "softmax_result"],
                            attrs={"k": ge.attr.Int(k), "renorm": ge.attr.Int(renorm),
                                   "output_softmax": ge.attr.Bool(output_softmax)})

    def add_up(rows: Any, places: Any, weights: Any) -> Any:
        return apis.MoeFinalizeRoutingV2(rows, places, None, None, None, weights, None, drop_pad_mode=_BY_TOKEN)

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_moe_token_unpermute.default)
    def convert_sum(permuted_tokens: Any, sorted_indices: Any, probs: Any = None, padded_mode: bool = False,
                    restore_shape: Any = None, meta_outputs: Any = None) -> Any:
        return add_up(permuted_tokens, sorted_indices, probs)

    if hasattr(torch.ops.npu, "_npu_moe_token_unpermute"):  # what newer wheels trace instead

        @module.register_fx_node_ge_converter(torch.ops.npu._npu_moe_token_unpermute.default)
        def convert_traced_sum(permuted_tokens: Any, sorted_indices: Any, probs: Any = None, padded_mode: bool = False,
                               restore_shape: Any = None, meta_outputs: Any = None) -> Any:
            return add_up(permuted_tokens, sorted_indices, probs), permuted_tokens


def _convert_rounding_norm(module: Any) -> None:
    """The norm that rounds by one scale, for GE: no wheel has a converter, and GE has the operator."""
    ge = _import("torchair.ge")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_add_rms_norm_quant.default)
    def convert(x1: Any, x2: Any, gamma: Any, scales1: Any, zero_points1: Any = None, beta: Any = None,
                scales2: Any = None, zero_points2: Any = None, *, axis: int = -1, epsilon: float = 1e-6,
                div_mode: bool = True, dst_type: Any = None, meta_outputs: Any = None) -> Any:
        inputs = {"x1": x1, "x2": x2, "gamma": gamma, "scales1": scales1, "scales2": scales2,
                  "zero_points1": zero_points1, "zero_points2": zero_points2}
        return ge.custom_op("AddRmsNormQuant", inputs=inputs, outputs=["y1", "y2", "x"], attrs={
            "axis": ge.attr.Int(axis), "epsilon": ge.attr.Float(epsilon), "div_mode": ge.attr.Bool(div_mode)})


def _convert_rounding_experts(module: Any) -> None:
    """Gate and up of int8 experts in one operator, for GE. In every wheel the shipped converter makes uint8 of the
    default type in between; A2 and A3 take float32 alone, which is GE's own default."""
    apis, ge = _import("torchair._ge_concrete_graph.ge_apis"), _import("torchair.ge")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.custom.grouped_matmul_swiglu_quant_v2")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2.default)
    def convert(x: Any, weight: Any, weight_scale: Any, x_scale: Any, group_list: Any, *, smooth_scale: Any = None,
                weight_assist_matrix: Any = None, bias: Any = None, dequant_mode: int = 0, dequant_dtype: Any = None,
                quant_mode: int = 0, quant_dtype: Any = None, group_list_type: int = 0, tuning_config: Any = None,
                x_dtype: Any = None, weight_dtype: Any = None, weight_scale_dtype: Any = None,
                x_scale_dtype: Any = None, meta_outputs: Any = None) -> Any:
        for_int4 = [apis.Fill([0], apis.Cast(0.0, dst_type=_GE_FLOAT32))]  # empty
        inputs = {"x": x, "x_scale": x_scale, "group_list": group_list, "weight": weight, "weight_scale": weight_scale,
                  "weight_assist_matrix": for_int4}
        return ge.custom_op("GroupedMatmulSwigluQuantV2", inputs=inputs, outputs=["y", "y_scale"], attrs={
            "dequant_mode": ge.attr.Int(dequant_mode), "quant_mode": ge.attr.Int(quant_mode),
            "group_list_type": ge.attr.Int(group_list_type)})


def _convert_softplus(module: Any) -> None:
    """The gates of Gated DeltaNet in GE: torchair's converter of softplus says that it is none."""
    apis = _import("torchair._ge_concrete_graph.ge_apis")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.aten.softplus")

    @module.register_fx_node_ge_converter(torch.ops.aten.softplus.default)
    def convert(x: Any, beta: float = 1.0, threshold: float = 20.0, meta_outputs: Any = None) -> Any:
        return apis.SoftplusV2(x, beta=float(beta), threshold=float(threshold))


def _convert_state_writes(module: Any) -> None:
    """Let GE write states in place. As shipped the pool is copied first, and torchair drops the copy only if no other
    operator reads the pool.

    Here the rows are read before they are written. The written values are computed from them, which keeps the order.
    """
    apis = _import("torchair._ge_concrete_graph.ge_apis")
    # The shipped one first: the last to register wins.
    _import("torchair._ge_concrete_graph.ge_converter.custom.npu_scatter_nd_update")

    @module.register_fx_node_ge_converter(torch.ops.npu.npu_scatter_nd_update.default)
    def convert(self: Any, indices: Any, updates: Any, meta_outputs: Any = None) -> Any:
        return apis.ScatterNdUpdate(self, indices, updates)


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
