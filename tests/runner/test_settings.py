"""Settings that this model or platform cannot do are refused by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import ConfigError

GRAPHS = {"graph_mode": "reduce-overhead", "max_num_seqs": 4}


@pytest.mark.parametrize(("settings", "message"), [
    ({"attention_backend": "flashinfer"}, "attention_backend 'flashinfer': cpu has"),
    ({"graph_batch_sizes": (1, 2)}, r"graph_batch_sizes \(1, 2\) has no use in eager mode"),
    ({**GRAPHS, "graph_batch_sizes": (1, 8)}, r"graph_batch_sizes \(1, 8\): no step has more than max_num_seqs 4"),
    ({"max_model_len": 1 << 30}, "max_model_len 1073741824 is more than the checkpoint's"),
    ({"use_graph_cache": True}, "use_graph_cache: platform cpu keeps no graphs in graph_mode eager"),
])
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(SHAPES_VL, platform="cpu", **settings)
