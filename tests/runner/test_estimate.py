"""`npu-runner doctor --fits` against real starts: weights, KV cache and states byte for byte, activations as GPUs
measured them. Knows no formula of a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import make_text_model, make_vision_model
from npu_runner.cli.main import main
from npu_runner.config import RunnerConfig
from npu_runner.layers.parallel import TensorParallel
from npu_runner.platforms import find_platform
from npu_runner.request.limits import GIB
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.runner import dummy
from npu_runner.runner.estimate import Estimate, estimate_memory
from npu_runner.strategies import pick_strategy
from scripts.sizing_table import MODELS, config_of, row
from tests import zygote
from tests.families import FAMILIES, RANKS, split_by
from tests.full_set import only_full
from tests.hub_cache import make_hub_cache
from tests.runner.rank_bytes import bytes_of_start, settings_for

ROOT = Path(__file__).parents[2]


def estimated(config: RunnerConfig, platform: str, device_bytes: int) -> Estimate:
    strategy = pick_strategy(Path(config.model))
    return estimate_memory(strategy, config, find_platform(platform), device_bytes)


def exact_bytes(path: Path, num_ranks: int, **experts: bool) -> dict[str, int]:
    found = estimated(settings_for(path, num_ranks, **experts), "cpu", 64 * GIB)
    return {"weights": found.profile.weights_bytes, "kv_cache": found.kv_cache_bytes,
            "states": found.states.num_bytes if found.states else 0}


FAST, OTHERS = split_by(RANKS)


@pytest.mark.parametrize("model_type", FAST)
def test_one_rank_takes_what_a_start_takes(model_type: str, checkpoint: Any) -> None:
    assert_as_a_start(model_type, checkpoint)


@pytest.mark.full("families that go the way of one in the fast set (tests/families.py)")
@pytest.mark.parametrize("model_type", OTHERS)
def test_one_rank_of_other_families_takes_what_a_start_takes(model_type: str, checkpoint: Any) -> None:
    assert_as_a_start(model_type, checkpoint)


def assert_as_a_start(model_type: str, checkpoint: Any) -> None:
    path: Path = checkpoint(model_type)
    real = bytes_of_start(path, TensorParallel())
    assert exact_bytes(path, 1) == real
    assert (real["states"] > 0) == FAMILIES[model_type].has_states


def test_each_of_two_ranks_takes_what_a_start_takes(checkpoint: Any, tmp_path: Path) -> None:
    """Of one with experts, states and a tower."""
    assert_two_ranks_as_a_start(["qwen3_5_moe"], checkpoint, tmp_path)


@pytest.mark.full("other families; one with experts, states and a tower stays")
def test_each_of_two_ranks_of_other_families_takes_what_a_start_takes(checkpoint: Any, tmp_path: Path) -> None:
    assert_two_ranks_as_a_start([name for name in (*FAST, *OTHERS) if name != "qwen3_5_moe"], checkpoint, tmp_path)


def test_of_two_ranks_with_whole_experts_the_first_takes_what_a_start_takes(checkpoint: Any, tmp_path: Path) -> None:
    """Of seven experts it holds four, the other one three."""
    path = checkpoint("qwen3_moe", num_experts=7)
    first, second = bytes_of_two_ranks([path], tmp_path, "whole")
    expected = exact_bytes(path, 2, has_whole_experts=True)
    assert first == [expected]
    num_layers, expert_bytes = 3, 3 * 40 * 64 * 4
    assert second == [{**expected, "weights": expected["weights"] - num_layers * expert_bytes}]


def assert_two_ranks_as_a_start(model_types: list[str], checkpoint: Any, tmp_path: Path) -> None:
    paths = [checkpoint(model_type, **FAMILIES[model_type].ranks) for model_type in model_types]
    expected = [exact_bytes(path, 2) for path in paths]
    assert bytes_of_two_ranks(paths, tmp_path, "sliced") == [expected, expected]


def bytes_of_two_ranks(paths: list[Path], tmp_path: Path, experts: str) -> list[list[dict[str, int]]]:
    """Of each rank, what each checkpoint takes."""
    command = [sys.executable, "-m", "tests.runner.rank_bytes"]
    ranks = [zygote.Popen([*command, str(rank), "2", str(tmp_path / "store"), experts, *map(str, paths)], cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                          stdout=subprocess.PIPE, text=True) for rank in range(2)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]


# Bytes that a start measured on one H100 80GB (torch 2.11.0+cu130, commit 85ef21d): the allocator's peak of the worst
# step less what stands. Shapes of bench/shapes.py; images of up to 1280 x 1280 pixels.
MEASURED: list[tuple[str, dict[str, Any], int]] = [
    ("qwen3-0.6b", {}, 1_790_249_984),
    ("qwen3-8b", {}, 1_790_254_080),
    ("qwen3-8b", {"max_num_seqs": 16, "max_num_batched_tokens": 16384}, 1_887_651_840),
    ("qwen3-vl-4b", {}, 1_958_714_368),
    ("qwen3-vl-4b", {"max_num_seqs": 32}, 1_016_544_768),
]


@pytest.mark.parametrize(("name", "settings", "measured"), [MEASURED[2], MEASURED[4], *only_full(
    "other sizes of the same families; a text model and one with a tower stay", *MEASURED[:2], MEASURED[3])])
def test_the_bound_on_activations_is_above_a_gpu_and_within_half_as_much_again(
        name: str, settings: dict[str, Any], measured: int, tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, name, 1280) if "vl" in name else make_text_model(tmp_path, name)
    found = estimated(RunnerConfig.from_keywords(path, platform="cuda", **settings), "cuda", 80 * GIB)
    assert measured < found.profile.activation_peak_bytes < 1.5 * measured
    if "vl" in name:
        assert 408_168_448 < found.profile.staging_bytes < 1.5 * 408_168_448


def test_the_bound_holds_for_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B cut to 8 layers, as the same GPU measured it."""
    (tmp_path / "config.json").write_text(json.dumps({**config_of("Qwen3-30B-A3B"), "num_hidden_layers": 8}))
    config = RunnerConfig.from_keywords(tmp_path, platform="cuda", max_num_seqs=16)
    assert 575_460_864 < estimated(config, "cuda", 80 * GIB).profile.activation_peak_bytes < 1.5 * 575_460_864


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("num_seqs", [1, 6, 256])
def test_rows_that_all_ask_for_the_whole_vocabulary_take_no_more_than_the_worst_step(
        num_seqs: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that a start measures samples among the most probable tokens of every row, which sorts all of them."""
    (tmp_path / "config.json").write_text(json.dumps({**config_of("Qwen3-8B"), "num_hidden_layers": 1}))
    config = RunnerConfig.from_keywords(tmp_path, platform="cuda", max_num_seqs=num_seqs, logprobs_mode=mode,
                                        max_num_batched_tokens=2 * num_seqs)
    worst = estimated(config, "cuda", 80 * GIB).profile.activation_peak_bytes
    monkeypatch.setattr(dummy, "_PARAMS", dummy._PARAMS.replace(logprobs=-1))
    assert estimated(config, "cuda", 80 * GIB).profile.activation_peak_bytes <= worst
    monkeypatch.setattr(dummy, "_PARAMS", SamplingParams(temperature=0, logprobs=-1))
    assert estimated(config, "cuda", 80 * GIB).profile.activation_peak_bytes <= worst


def test_room_for_prompts_over_caches_in_fp8_counts(tmp_path: Path) -> None:
    """cuda makes 16 bits of what prefills read: twice 8,192 tokens of 8 heads of 128, keys and values, for all layers.
    """
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen3-8B")))
    plain, fp8 = (estimated(RunnerConfig.from_keywords(tmp_path, platform="cuda", kv_cache_dtype=dtype), "cuda",
                            80 * GIB).profile.activation_peak_bytes for dtype in ("auto", "fp8"))
    assert fp8 - plain == pytest.approx(1.1 * 2 * 8192 * 8 * 128 * 2 * 2, abs=1)


@pytest.mark.parametrize("page", ["running-on-ascend.md", "running-on-ascend.zh.md"])
def test_the_table_of_sizes_has_a_row_for_each_model(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [model for model in MODELS if f"\n| {model} | " in text] == list(MODELS)


@pytest.mark.full("takes half a minute; that each model has a row stays, and what the command says")
@pytest.mark.parametrize("model", MODELS)
def test_the_table_of_sizes_is_what_the_command_says(model: str) -> None:
    assert_row(model)


def assert_row(model: str) -> None:
    line = row(model, "npu")
    for page in ("running-on-ascend.md", "running-on-ascend.zh.md"):
        assert line in (ROOT / "docs" / page).read_text().splitlines()


NUM_LAYERS = 6


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    """A bare config.json, without weights, tokenizer or preprocessor."""
    file = tmp_path / "Qwen3-8B.json"
    file.write_text(json.dumps({**config_of("Qwen3-8B"), "num_hidden_layers": NUM_LAYERS}))
    return str(file)


def fits(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", "--fits", *options])
    return status, json.loads(capsys.readouterr().out)


def test_what_does_not_fit_names_what_would(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (config_file, "--device-memory", "8G", "--max-model-len")
    status, found = fits(capsys, *asked, "40960")
    assert (status, found["fits"], found["kv_cache_tokens"]) == (1, False, 0)
    ranks, length, int8 = found["remedies"]
    assert int8 == "--quantization int8"
    assert fits(capsys, *asked, "40960", *int8.split())[0] == 0
    assert ranks == "--tensor-parallel-size 2"
    assert fits(capsys, *asked, "40960", *ranks.split())[0] == 0
    longest = int(length.removeprefix("--max-model-len "))
    status, found = fits(capsys, *asked, str(longest))
    assert (status, found["sequences_of_max_model_len"]) == (0, 1)
    assert longest <= found["kv_cache_tokens"] < 40960


def test_settings_count_as_a_job_takes_them(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (config_file, "--device-memory", "64G")
    _, plain = fits(capsys, *asked)
    _, halved = fits(capsys, *asked, "--max-num-seqs", "64", "--memory-utilization", "0.8")
    assert halved["activations_bytes"] < plain["activations_bytes"]
    assert halved["kv_cache_bytes"] < plain["kv_cache_bytes"]
    _, whole = fits(capsys, *asked, "--dtype", "float16", "--kv-cache-bytes", "1G", "--enforce-eager")
    block_bytes = NUM_LAYERS * 2 * 8 * 128 * 128 * 2
    assert (whole["graphs_bytes"], whole["kv_cache_bytes"]) == (0, (1 << 30) // block_bytes * block_bytes)


def test_drafts_count_and_an_adapter_is_opened(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (config_file, "--device-memory", "64G")
    _, plain = fits(capsys, *asked)
    drafts = '{"method": "ngram", "num_speculative_tokens": 16}'
    status, drafted = fits(capsys, *asked, "--speculative-config", drafts)
    assert status == 0
    assert drafted["activations_bytes"] > plain["activations_bytes"]
    assert main(["doctor", "--fits", *asked, "--lora", "/nowhere"]) == 2
    assert "lora /nowhere: there is no adapter_config.json" in capsys.readouterr().err


@pytest.mark.full("a real size, twice; of two ranks with whole experts, against a start, stays")
def test_whole_experts_count_as_a_start_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of three ranks holds 43 of 128 experts."""
    file = tmp_path / "moe.json"
    file.write_text(json.dumps({**config_of("Qwen3-30B-A3B"), "num_attention_heads": 24, "num_key_value_heads": 3}))
    asked = (str(file), "--device-memory", "80G", "--tensor-parallel-size", "3")
    _, sliced = fits(capsys, *asked)
    _, whole = fits(capsys, *asked, "--enable-expert-parallel")
    expert_bytes, layers = 3 * 768 * 2048 * 2, 48
    assert whole["weights_bytes"] - sliced["weights_bytes"] == layers * (43 * expert_bytes - 128 * expert_bytes // 3)


def test_a_hub_id_is_found_in_the_cache_by_its_small_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = make_hub_cache(tmp_path, monkeypatch)
    (files / "config.json").write_text(json.dumps(config_of("Qwen3-0.6B")))
    status, found = fits(capsys, "owner/name", "--device-memory", "64G")
    assert (status, found["fits"]) == (0, True)


def test_what_it_prints_is_called_an_estimate(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--fits", config_file, "--device-memory", "7G"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("an estimate for platform npu, bfloat16")
    assert lines[-2].startswith("does not fit: ")
    assert lines[-1] == "would fit: --tensor-parallel-size 2 or --quantization int8"


@pytest.mark.parametrize(("options", "reason"), [
    (["--fits", "shapes-vl"], "add --device-memory 64G"),
    (["--device-memory", "64G"], "--device-memory is for --fits alone"),
    (["--max-num-seqs", "4"], "--max-num-seqs is for --fits alone"),
    (["--fits", "shapes-vl", "--device-memory", "64G", "--platform", "cpu"], "no device with memory of its own"),
    (["--fits", "shapes-vl", "--device-memory", "64G", "--tensor-parallel-size", "3"],
     "tensor_parallel_size 3 is no multiple of num_key_value_heads 2"),
])
def test_what_cannot_be_estimated_is_refused(options: list[str], reason: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    assert reason in capsys.readouterr().err
