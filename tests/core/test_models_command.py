"""`npu-runner models MODEL`: one line that says how a checkpoint would be served, or why not. The reason is that of a
start. Knows no family's table (tests/core/test_models_table.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.assets import SHAPES_VL
from npu_runner.cli.main import main
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.strategies import open_checkpoint, pick_strategy
from tests.hub_cache import make_hub_cache

STRATEGY = "npu_runner.strategies.qwen3_vl.Qwen3VLStrategy"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded checkpoint, with files of its own to be changed."""
    made = tmp_path / "model"
    made.mkdir()
    for file in SHAPES_VL.iterdir():
        (made / file.name).symlink_to(file)
    return made


def change(file: Path, **fields: Any) -> None:
    """Other values in a JSON file; None takes a field out."""
    values = json.loads(file.read_text()) | fields
    file.unlink()
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["models", *arguments])
    (line,) = capsys.readouterr().out.splitlines()
    return status, line


def test_a_folder_a_config_alone_and_an_embedded_model_are_served(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = folder.parent / "config.json"
    alone.write_text((folder / "config.json").read_text())
    for model in (str(folder), str(alone), "shapes-vl"):
        assert ask(capsys, model) == (
            0, f"{model}: served as qwen3_vl, by {STRATEGY}: text, images and videos in, text out")


def test_a_classifier_gives_classes_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "config.json", architectures=["Qwen3VLForSequenceClassification"])
    assert ask(capsys, str(folder)) == (
        0, f"{folder}: served as qwen3_vl, by {STRATEGY}: text, images and videos in, classes (/v1/classify) out")
    for option, value in (("--runner", "generate"), ("--task", "embed")):
        status, line = ask(capsys, str(folder), option, value)
        assert status == 1
        assert f"{option[2:]} {value}: architectures names Qwen3VLForSequenceClassification, a classifier" in line


def test_of_a_hub_id_the_small_files_in_the_cache_are_enough(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = make_hub_cache(tmp_path, monkeypatch)
    for file in SHAPES_VL.glob("*.json"):
        (files / file.name).symlink_to(file)
    status, line = ask(capsys, "owner/name")
    assert (status, line.startswith(f"owner/name: served as qwen3_vl, by {STRATEGY}: ")) == (0, True), line
    status, line = ask(capsys, "owner/name", "--revision", "older")
    assert (status, line.startswith("owner/name: not served: model 'owner/name' at revision 'older': ")) == (1, True)


def test_scores_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    served = f"shapes-vl: served as qwen3_vl, by {STRATEGY}: text, images and videos in, "
    assert ask(capsys, "shapes-vl", "--task", "score") == (0, f"{served}scores (/v1/score, /v1/rerank) out")


def test_vectors_are_said_by_the_checkpoint_or_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = f"{folder}: served as qwen3_vl, by {STRATEGY}: text, images and videos in, "
    assert ask(capsys, str(folder), "--runner", "pooling") == (0, f"{served}vectors (/v1/embeddings) out")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (folder / "modules.json").write_text(json.dumps([
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]))
    assert ask(capsys, str(folder)) == (0, f"{served}vectors (/v1/embeddings) out")
    assert ask(capsys, str(folder), "--runner", "generate") == (0, f"{served}text out")


def test_a_checkpoint_that_takes_no_videos_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "config.json", video_token_id=None)
    status, line = ask(capsys, str(folder))
    assert status == 0
    assert line.endswith(": text and images in, text out; no videos: config.json's video_token_id None is no token of "
                         "tokenizer.json")


def test_what_transformers_serves_is_said_to_go_through_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    config = str(tmp_path / "config.json")
    assert ask(capsys, config) == (
        0, f"{config}: served as gpt2, through transformers, by npu_runner.strategies."
           "transformers_model.TransformersStrategy: text in, text out")
    status, line = ask(capsys, config, "--runner", "pooling")
    assert (status, "which generates text only" in line) == (1, True)
    for setting in ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, {"graph_mode": "max-autotune"}):
        with pytest.raises(ConfigError, match="served through transformers"):
            pick_strategy(tmp_path).resolve_config(RunnerConfig(model=str(tmp_path)).replace(**setting))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "mxfp4"}}, "the weights are quantised (mxfp4)"),
    "unknown": ({"model_type": "no_such_model"}, "model_type 'no_such_model' is not supported; supported are "),
    "code of its own": ({"model_type": "dots_ocr", "auto_map": {"AutoConfig": "code.Config"}},
                        "is not supported (the checkpoint's own code, auto_map, is never run)"),
    "a field is missing": ({"text_config": {}}, "is missing for model_type 'qwen3_vl'"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_served_has_the_words_of_a_start(
        why: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, words = REFUSED[why]
    config = folder / "config.json"
    change(config, **changes)
    with pytest.raises(ConfigError) as refused:
        open_checkpoint(RunnerConfig(model=str(folder)))
    assert words in str(refused.value)
    for model in (folder, config):  # of config.json alone no copy is named
        reason = str(refused.value).removeprefix(f"{folder}: ").removeprefix(f"{model}: ")
        assert ask(capsys, str(model)) == (1, f"{model}: not served: {reason}")


MISSING = {
    "config.json": "has no config.json: it is not a checkpoint folder",
    "tokenizer.json": "tokenizer.json",
    "model.safetensors": "holds neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin cannot",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_folder_that_lacks_a_file_is_not_served(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).unlink()
    (folder / "pytorch_model.bin").touch()
    assert main(["models", "--json", str(folder)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["served"], MISSING[name] in found["reason"]) == (False, True), found


def test_what_is_no_checkpoint_is_said_without_torch() -> None:
    code = ("import sys; from npu_runner.cli.main import main\n"
            "assert main(['models', './no-such-folder']) == 1\n"
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("./no-such-folder: not served: model './no-such-folder': there is no such folder")


def test_a_setting_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--runner", "pooling"]) == 2
    assert "--runner is a setting of a model" in capsys.readouterr().err
