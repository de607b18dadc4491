"""The kinds of decoder layer whose launches are counted, and checkpoints that differ in nothing but their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "head_dim": 256,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                             "mrope_section": [11, 11, 10]}}
LAYERS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """`launches` of a decode step by graph mode; `emulation`: the CANN that they are counted on."""

    model_type: str
    launches: dict[str, int]
    changes: Callable[[int], dict[str, Any]]
    has_attention: bool = True
    emulation: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Of the engine."""
    stored: str | None = None
    """The format in which its checkpoints are quantised, if they are."""

    def config(self, count: int) -> dict[str, Any]:
        """What a tiny checkpoint with `count` layers of the kind has of its own."""
        return {**SIZES, **self.changes(count)}


def _plain(count: int) -> dict[str, Any]:
    return {"head_dim": 128, "num_hidden_layers": count}


def _delta(count: int) -> dict[str, Any]:
    return {**DELTA, "num_hidden_layers": count + 1, "layer_types": ["full_attention", *["linear_attention"] * count]}


def _gated_attention(count: int) -> dict[str, Any]:
    return {**DELTA, "num_hidden_layers": count + 1, "layer_types": ["linear_attention", *["full_attention"] * count]}


def _everywhere(launches: int) -> dict[str, int]:
    return dict.fromkeys(("eager", "reduce-overhead", "max-autotune"), launches)


KINDS = {
    "dense": LayerKind(model_type="qwen3", launches=_everywhere(13), changes=_plain),
    # Two more: the norms round for the matmuls behind them, and two matmuls round their inputs themselves.
    "dense, int8": LayerKind(model_type="qwen3", launches=_everywhere(15), changes=_plain,
                             settings={"quantization": "int8"}),
    # As many: two norms round, and two matmuls round their inputs themselves.
    "dense, int8 with static inputs": LayerKind(model_type="qwen3", launches=_everywhere(15), changes=_plain,
                                                stored="modelslim-w8a8"),
    # Attention's second matmul rounds its inputs itself; one operator multiplies with gate and up and rounds for down.
    "experts, int8": LayerKind(model_type="qwen3_moe", launches=_everywhere(17), changes=lambda count: {
        **_plain(count), "moe_intermediate_size": 64}, settings={"quantization": "int8"}),
    "experts": LayerKind(model_type="qwen3_moe", launches=_everywhere(17), changes=_plain),
    "gated delta, fused": LayerKind(
        model_type="qwen3_5_text", launches={"eager": 24, "reduce-overhead": 24, "max-autotune": 45},
        changes=_delta, emulation={"cann_version": "9.2.0"}, has_attention=False),
    "gated delta, plain": LayerKind(
        model_type="qwen3_5_text", launches={"eager": 35, "reduce-overhead": 35, "max-autotune": 45},
        changes=_delta, has_attention=False),
    "gated attention": LayerKind(
        model_type="qwen3_5_text", launches={"eager": 21, "reduce-overhead": 21, "max-autotune": 25},
        changes=_gated_attention),
    # Its norms have float32 weights, which no operator rounds behind. So each matmul rounds its inputs (four), the
    # gates are a matmul of their own, and both are put side by side.
    "gated delta, int8": LayerKind(
        model_type="qwen3_5_text", launches={"eager": 30, "reduce-overhead": 30, "max-autotune": 51},
        changes=_delta, emulation={"cann_version": "9.2.0"}, has_attention=False, settings={"quantization": "int8"}),
}
"""The graph engine takes no states in float32: there Gated DeltaNet goes through plain operators."""
