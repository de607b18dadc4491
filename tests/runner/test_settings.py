"""Settings that this model or platform cannot do are refused by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.assets import SHAPES_VL
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ConfigError
from npu_runner.runner.settings import DEFAULT_MAX_MODEL_LEN

GRAPHS = {"graph_mode": "reduce-overhead", "max_num_seqs": 4}


@pytest.mark.parametrize(("settings", "message"), [
    ({"attention_backend": "flashinfer"}, "attention_backend 'flashinfer': cpu has"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: platform cpu keeps them in the model's dtype"),
    ({"graph_batch_sizes": (1, 2)}, r"graph_batch_sizes \(1, 2\) has no use in eager mode"),
    ({**GRAPHS, "graph_batch_sizes": (1, 8)}, r"graph_batch_sizes \(1, 8\): no step has more than 4 rows"),
    ({"max_model_len": 1 << 30}, "max_model_len 1073741824 is more than the checkpoint's"),
    ({"max_num_seqs": 4_000_000}, r"max_num_seqs 4000000 is more than 3728270: .* lower it to at most 3728270"),
    ({"max_state_snapshots": 0}, "max_state_snapshots 0: qwen3_vl has no layers with state; leave it out"),
    ({"enable_expert_parallel": True}, "enable_expert_parallel: qwen3_vl has no layers of experts; leave it out"),
    ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "qwen3_vl has no layers of experts; leave it out"),
    ({"enable_expert_parallel": "yes"}, "enable_expert_parallel: 'yes' is neither true nor false"),
    ({"use_graph_cache": True}, "use_graph_cache: platform cpu keeps no graphs in graph_mode eager"),
    ({"kv_cache_bytes": 1 << 50}, r"kv_cache_bytes 1048576.00 GiB: [\d.]+ .iB of memory is free; lower it"),
    ({"tool_call_parser": "hermess"}, "tool_call_parser: 'hermess'"),
    ({"chat_template_kwargs": {"enable_thinkin": False}}, "enable_thinkin"),
])
def test_refused(settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("a weight is read"))
    with pytest.raises(ConfigError, match=message):
        LLM(SHAPES_VL, platform="cpu", **settings)


def test_a_length_that_only_memory_cut_is_told_from_one_that_was_given() -> None:
    small: dict[str, Any] = {"platform": "cpu", "kv_cache_bytes": 1 << 20}
    with LLM(SHAPES_VL, **small) as llm:
        cut = llm.engine.info
    assert not cut.max_model_len_is_given
    assert cut.max_model_len < DEFAULT_MAX_MODEL_LEN
    with LLM(SHAPES_VL, max_model_len=cut.max_model_len, **small) as llm:
        given = llm.engine.info
    assert given.max_model_len_is_given
    assert given.max_model_len == cut.max_model_len, "asked for by name, a later run has the same"
