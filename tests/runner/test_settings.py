"""Settings that this model or platform cannot do are refused by name, before anything is loaded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import make_text_model, make_vision_model
from npu_runner import LLM
from npu_runner.assets import EMBEDDED, SHAPES_VL
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.platforms import find_platform
from npu_runner.runner.settings import DEFAULT_MAX_MODEL_LEN, SHORT_TOKENS, Settings, resolve_settings
from npu_runner.strategies import pick_strategy

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
    ({"disable_custom_all_reduce": 1}, "disable_custom_all_reduce: 1 is neither true nor false"),
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


def on_cuda(model: Path = SHAPES_VL, **settings: Any) -> Settings:
    config = RunnerConfig(model=str(model), platform="cuda").replace(**settings)
    strategy = pick_strategy(model)
    return resolve_settings(config, strategy.model_config_for(config), find_platform("cuda"), None)


@pytest.mark.parametrize("most", [1000, 1024, 1025, 1100, 2048, 5000, 8192, 8193, 65536])
def test_up_to_eight_long_prefills_reach_a_whole_step(most: int) -> None:
    """None wastes more than an eighth of a step, to the next multiple of 128."""
    sizes = on_cuda(max_num_batched_tokens=most).long_prefill_sizes
    assert len(sizes) <= 8
    assert sizes[-1:] == ((most,) if most > SHORT_TOKENS else ())
    assert all(larger - size <= -(-most // 1024) * 128 for size, larger in pairwise((SHORT_TOKENS, *sizes)))
    assert on_cuda(max_num_batched_tokens=8192).long_prefill_sizes == tuple(range(2048, 8192 + 1, 1024))


@pytest.mark.parametrize("settings", [
    {"kv_cache_dtype": "fp8"}, {"model": EMBEDDED["shapes-hybrid"]}, {"graph_mode": "eager"},
    {"graph_prefill_sizes": (2048,)}, {"graph_prefill_sizes": (0,)}, {"attention_backend": "flashinfer"},
    {"max_num_seqs": 2, "max_model_len": 512}],
    ids=str)
def test_none_are_timed_where_none_could_be_recorded_or_sizes_are_given(settings: dict[str, Any]) -> None:
    assert on_cuda(**settings).long_prefill_sizes == ()


def test_long_prefills_over_an_fp8_cache_are_refused_by_name() -> None:
    sizes = {"graph_prefill_sizes": (512, 2048)}
    assert on_cuda(**sizes).prefill_sizes == (512, 2048)
    assert on_cuda(kv_cache_dtype="fp8", graph_prefill_sizes=(512, 1024)).prefill_sizes == (512, 1024)
    with pytest.raises(ConfigError, match="more than 1024 tokens over an FP8 cache are not recorded; leave it out"):
        on_cuda(kv_cache_dtype="fp8", **sizes)


def test_steps_of_a_narrow_model_keep_the_device_for_longer_than_the_host_launches_them(tmp_path: Path) -> None:
    """Its prefills with images, or through layers with state, are in no graph. Those of text alone are."""
    hybrid = EMBEDDED["shapes-hybrid"]
    assert {on_cuda(model).max_num_batched_tokens for model in (SHAPES_VL, hybrid)} == {16384}
    wide, text = make_vision_model(tmp_path / "wide", "qwen3-vl-2b", 448), make_text_model(tmp_path, "qwen3-0.6b")
    assert {on_cuda(model).max_num_batched_tokens for model in (wide, text)} == {8192}
    assert on_cuda(hybrid, max_num_batched_tokens=8192).max_num_batched_tokens == 8192


def test_a_model_that_pools_records_prefills_alone() -> None:
    for settings in ({}, {"graph_mode": "reduce-overhead"}):
        found = on_cuda(runner="pooling", **settings)
        assert (found.graph_mode, found.makes_graphs, found.prefill_sizes[:2]) == ("eager", True, (16, 32))
        assert found.long_prefill_sizes
    found = on_cuda(runner="pooling", graph_mode="eager")
    assert (found.makes_graphs, found.prefill_sizes, found.long_prefill_sizes) == (False, (), ())
