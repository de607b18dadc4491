"""Configs of families some or all of whose layers have a sliding window."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
ALL_SLIDE: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "layer_types": [SLIDING] * 3},
    "qwen3_moe": {"use_sliding_window": True, "max_window_layers": 99},
}
SOME_SLIDE: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
}
