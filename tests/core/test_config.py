"""Settings and model folders that cannot work: each is a ConfigError that says what is wrong and what would help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, RunnerConfig, SamplingParams
from npu_runner.assets import EMBEDDED, SHAPES_VL
from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.config import GraphConfig, PromptConfig, SchedulerConfig, flat_fields, flat_values
from npu_runner.errors import ConfigError, ModelError, OutOfMemoryError
from npu_runner.strategies import strategies_by_model_type
from tests import zygote
from tests.oracle.changed_checkpoints import spoiled

SMALL: dict[str, Any] = {"platform": "cpu", "max_model_len": 64, "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seq": 3}, "unknown setting 'max_num_seq'; did you mean max_num_seqs"),
        ({"trust_remote_code": True}, "trust_remote_code=True is not served: no code of a checkpoint is ever run"),
        ({"abacus": True}, "unknown setting 'abacus'; docs/options.md lists all, docs/from-vllm.md vLLM's"),
        ({"kv_cache_bytes": "64 sheep"}, "kv_cache_bytes: '64 sheep' is not a size; write 1073741824, 1024M or 1G"),
        ({"limit_mm_per_prompt": {"audio": 1}}, "limit_mm_per_prompt: 'audio' is not served, image and video are"),
        ({"limit_mm_per_prompt": {"image": 9}, "max_images_per_prompt": 5}, "more than max_images_per_prompt 5"),
        ({"video_fps": 1.0, "video_num_frames": 4}, "video_num_frames: contradicts video_fps"),
        ({"chat_template": "no such file"}, "chat_template: 'no such file' cannot be read"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        ({"graph_mode": "fast"}, "graph_mode: 'fast' is not one of"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 is not a positive integer"),
        ({"max_num_seqs": True}, "max_num_seqs: True is not a positive integer"),
        ({"max_model_len": 1.5}, "max_model_len: 1.5 is not a positive integer"),
        ({"memory_utilization": 1.1}, "memory_utilization: 1.1 is outside 0.05 to 1.0"),
        ({"vision_cache_bytes": -1}, "vision_cache_bytes: -1 is negative"),
        ({"max_source_pixels": 0}, "max_source_pixels: 0 is not a positive integer"),
        ({"image_min_pixels": 9, "image_max_pixels": 8}, "image_min_pixels 9 is more than image_max_pixels 8"),
        ({"enforce_eager": True, "graph_mode": "max-autotune"}, "enforce_eager contradicts graph_mode"),
        ({"graph_batch_sizes": ()}, "graph_batch_sizes"),
        ({"graph_batch_sizes": (0, 4)}, "graph_batch_sizes"),
        ({"max_state_snapshots": -1}, "max_state_snapshots: -1 is not a number of snapshots; 0 keeps none"),
        ({"max_state_snapshots": 2, "enable_prefix_caching": False}, "max_state_snapshots 2: snapshots are for"),
        ({"step_timeout_seconds": 0}, "step_timeout_seconds: 0 is not positive"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("anywhere", **settings)
    assert words in str(caught.value)


def test_a_config_is_not_written_afterwards() -> None:
    config = RunnerConfig.from_keywords(model="x", graph_batch_sizes=(8, 2, 8))
    assert config.graphs.graph_batch_sizes == (2, 8)
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]
    assert config.replace(seed=3).seed == 3
    with pytest.raises(ConfigError):
        config.replace(max_num_seqs=0)


def test_flat_names_and_parts_say_the_same() -> None:
    flat = RunnerConfig.from_keywords("m", max_num_seqs=3, image_max_pixels=9, enforce_eager=True, seed=5)
    assert flat == RunnerConfig(model="m", seed=5, scheduler=SchedulerConfig(max_num_seqs=3),
                                prompts=PromptConfig(image_max_pixels=9), graphs=GraphConfig(enforce_eager=True))
    assert flat.replace(max_num_seqs=None).scheduler == SchedulerConfig()
    assert flat.replace(max_num_seqs=None).prompts == flat.prompts
    assert set(flat_values(flat)) == set(flat_fields(RunnerConfig))


def test_a_part_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'scheduler'"):
        LLM("anywhere", scheduler=SchedulerConfig())


@pytest.mark.parametrize("model_type", ["unheard_of", None])
def test_an_unknown_model_type_gets_the_list_of_known_ones(model_type: str | None, checkpoint: Any,
                                                           tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(spoiled(checkpoint, tmp_path, model_type=model_type), **SMALL)
    assert f"model_type {model_type!r} is not supported; supported are" in str(caught.value)
    assert all(name in str(caught.value) for name in strategies_by_model_type())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": None}, "field 'hidden_size' is missing for model_type 'qwen3'"),
        ({"num_hidden_layers": "many"}, "config.json: invalid literal"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "weights are quantised (mxfp4), which is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "weights are quantised (bitsandbytes), which is"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "the weights are quantised (modelopt), which is not"),
        ({"quantization_config": {"bits": 4}}, "quantised (quantization_config {'bits': 4}), which is not"),
        ({"quantization_config": "int8"}, "the weights are quantised (quantization_config 'int8')"),
        ({"text_config": {"quantization_config": {"group_size": 0}}}, "(quantization_config {'group_size': 0})"),
        ({"compression_config": {"format": "int-quantized"}}, "quantised (compressed-tensors, config_groups None)"),
        ({"quantize": "w8a8"}, "(quantize 'w8a8'), which is not supported; fp8, compressed-tensors, AWQ, GPTQ and"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window 'wide' is not a number of tokens"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window 0 is not a number of tokens"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is False and sliding_window None; both are"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types names 'chunked_attention', which is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_cannot_be_served_is_explained(config: Any, words: str, checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(spoiled(checkpoint, tmp_path, **config), **SMALL)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json: it is not a checkpoint folder"),
        ("config.json", b"{", "config.json"),
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"\xff\xfe", "config.json"),
        ("config.json", b'{"a":' * 100_000, "config.json"),
        ("generation_config.json", b"{", "generation_config.json"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer"),
        ("preprocessor_config.json", None, "preprocessor_config.json is missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_model_folder_names_the_file(file: str, content: bytes | None, words: str, checkpoint: Any,
                                              tmp_path: Path) -> None:
    path = spoiled(checkpoint, tmp_path, "qwen3_vl")
    (path / file).unlink()
    if content is not None:
        (path / file).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        LLM(path, **SMALL)
    assert words in str(caught.value)


def test_a_kv_budget_that_holds_no_sequence_names_the_setting_and_shows_the_ledger(checkpoint: Any) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(checkpoint("qwen3"), **SMALL, kv_cache_bytes=30_000)
    assert "one sequence of 64 tokens needs" in str(caught.value)
    assert "raise kv_cache_bytes, or lower max_model_len" in str(caught.value)
    assert "memory ledger" in str(caught.value)


def test_a_length_that_nobody_asked_for_is_cut_to_the_kv_budget(checkpoint: Any) -> None:
    with LLM(checkpoint("qwen3"), platform="cpu", kv_cache_bytes=10 * 12_288) as llm:
        assert llm.engine.max_model_len == 9 * 16, "of ten blocks one is the null block"


def run(script: str, *arguments: str, start: Any = zygote, **environment: str) -> str:
    """start: `subprocess` for variables that are read while modules load."""
    done = start.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True,
                     env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


REFUSED = """
import sys
from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.errors import ConfigError
try:
    resolve_checkpoint(*sys.argv[1:])
except ConfigError as error:
    print(type(error).__name__, error)
"""


def test_a_hub_id_without_network_says_what_to_do(tmp_path: Path) -> None:
    # An address of this host where nobody listens: as good as no network, and as fast as refusing.
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    message = run(REFUSED, "owner/name", "v2", start=subprocess, **nobody)
    assert message.startswith("ModelError model 'owner/name' at revision 'v2':")
    assert "the hub cannot be reached; copy the checkpoint to this host and pass its folder" in message
    offline = run(REFUSED, "owner/name", start=subprocess, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "the hub cannot be reached" in offline


def test_an_embedded_model_has_a_short_name_which_a_folder_goes_before(tmp_path: Path, monkeypatch: Any) -> None:
    assert resolve_checkpoint("shapes-vl") == EMBEDDED["shapes-vl"] == SHAPES_VL
    with pytest.raises(ModelError, match=r"nor embedded .*shapes-vl"):
        resolve_checkpoint("shapes")
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "shapes-vl"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    assert resolve_checkpoint("shapes-vl") == mine


@pytest.mark.parametrize(
    ("model", "words"),
    [("no/such/folder", "there is no such folder"), ("/no/folder", "there is no such folder"),
     ("./x/y", "there is no such folder"), ("owner/na me!", "neither a folder nor a valid hub id")],
)  # fmt: skip
def test_a_model_that_is_neither_a_folder_nor_a_hub_id_is_refused(model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        LLM(model, platform="cpu")


def test_a_revision_of_a_folder_is_refused(checkpoint: Any) -> None:
    with pytest.raises(ModelError, match=r"revision 'v2' was given, but .* is a local folder"):
        LLM(checkpoint("qwen3"), revision="v2", platform="cpu")


PLUGIN = """
from npu_runner.strategies.qwen3 import Qwen3Strategy

class RenamedStrategy(Qwen3Strategy):
    model_types = ("renamed",)

not_a_strategy = 3
"""
GENERATE = """
import sys
from npu_runner import LLM, SamplingParams
with LLM(sys.argv[1], platform="cpu", max_model_len=64) as llm:
    (output,) = llm.generate(["which"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    print(type(llm.engine._executor._runner.strategy).__name__, output.token_ids)
"""
PICK = """
import sys
from pathlib import Path
from npu_runner.errors import ConfigError
from npu_runner.strategies import pick_strategy
try:
    pick_strategy(Path(sys.argv[1]))
except ConfigError as error:
    print(type(error).__name__, error)
"""


def install(site: Path, value: str) -> None:
    """What an installer leaves of a package with an entry point."""
    (site / "their_models.py").write_text(PLUGIN)
    info = site / "their_models-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[npu_runner.strategies]\nrenamed = their_models:{value}\n")


def test_a_strategy_of_another_package_serves_its_model_type(checkpoint: Any, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    model = str(spoiled(checkpoint, tmp_path, model_type="renamed"))
    with pytest.raises(ModelError, match="model_type 'renamed' is not supported"):
        LLM(model, **SMALL)
    with LLM(checkpoint("qwen3"), **SMALL) as llm:
        (ours,) = llm.generate(["which"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    install(site, "RenamedStrategy")
    assert run(GENERATE, model, PYTHONPATH=paths) == f"RenamedStrategy {ours.token_ids}\n"
    other = str(spoiled(checkpoint, tmp_path / "other", model_type="unheard_of"))
    refusal = run(PICK, other, PYTHONPATH=paths)
    assert all(name in refusal for name in (*strategies_by_model_type(), "renamed"))
    install(site, "not_a_strategy")
    assert "their_models:not_a_strategy) is not a LoadStrategy subclass" in run(PICK, model, PYTHONPATH=paths)
