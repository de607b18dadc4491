"""The limits of a platform's attention bound a start: the longest context, and the elements of a layer's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import make_text_model
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.platforms import find_platform
from npu_runner.request.limits import GIB
from npu_runner.runner.estimate import Estimate, estimate_memory
from npu_runner.strategies import pick_strategy
from tests.full_set import only_full

INT32 = 2**31 - 1
KV_HEADS, HEAD_DIM, LAYERS = 8, 128, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of wide keys, for a context of a million tokens; it has no weights."""
    folder = make_text_model(tmp_path_factory.mktemp("wide"), "qwen3-0.6b")
    config = json.loads((folder / "config.json").read_text()) | {
        "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def estimated(model: Path, platform: str, **settings: Any) -> Estimate:
    config = RunnerConfig(model=str(model), platform=platform).replace(**settings)
    return estimate_memory(pick_strategy(model), config, find_platform(platform), 128 * GIB)


def test_a_context_that_no_kernel_reads_is_refused_before_anything_is_loaded(model: Path) -> None:
    assert estimated(model, "npu", max_model_len=262_144).plan is not None
    with pytest.raises(ConfigError, match="max_model_len 262145: the attention of platform npu reads at most 262144 "
                                          "tokens of a sequence; lower it to that"):
        estimated(model, "npu", max_model_len=262_145)
    assert estimated(model, "cuda", max_model_len=262_145).settings.max_model_len == 262_145


@pytest.mark.parametrize("more", [{}, *only_full("another way to the same limit", {"kv_cache_bytes": 100 * GIB})],
                         ids=["measured", "asked for"])
def test_keys_of_a_layer_stay_within_what_the_kernel_addresses(model: Path, more: dict[str, Any]) -> None:
    """128 GiB would hold seven times as many."""
    settings = {"max_model_len": 262_144, "max_num_seqs": 512, **more}
    plans = {name: estimated(model, name, **settings).plan for name in ("npu", "cuda")}
    per_block = {"npu": 128 * KV_HEADS * HEAD_DIM}
    assert plans["npu"] is not None
    assert plans["cuda"] is not None
    assert INT32 - per_block["npu"] < plans["npu"].num_blocks * per_block["npu"] <= INT32
    assert f"no more blocks, since attention addresses {INT32} elements of a layer's keys" in plans["npu"].ledger
    assert plans["cuda"].num_blocks * KV_HEADS * HEAD_DIM * find_platform("cuda").defaults.block_size > 5 * INT32
    assert "addresses" not in plans["cuda"].ledger
