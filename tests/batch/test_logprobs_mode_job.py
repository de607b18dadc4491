"""A job writes processed log probabilities without an infinity, keeps to its mode, and refuses what rows lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu_runner.assets import SHAPES_VL
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.run import run_batch
from npu_runner.batch.rows.logprobs_json import LOWEST_LOGPROB
from npu_runner.cli import main as cli
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from tests.batch.scripted import completion_row, read_rows, row, write_rows

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]


def test_processed_values_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"temperature": 0.5, "top_k": 2, "seed": 1, "max_tokens": 3}
    write_rows(tmp_path / "rows.jsonl", [
        row("chat", logprobs=True, top_logprobs=4, **asked), completion_row("text", logprobs=4, **asked),
        row("all", logprobs=True, top_logprobs=-1), completion_row("of prompt", prompt_logprobs=-1),
        row("states", return_hidden_states=True)])  # fmt: skip

    def run(*options: str) -> int:
        return cli.main(["batch", "-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl"), *SMALL,
                         *options])

    assert run("--logprobs-mode", "raw_logits") == 2
    assert "logprobs_mode raw_logits: rows have fields of log probabilities alone" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    assert run("--logprobs-mode", "processed_logprobs") == 3
    assert "Infinity" not in (tmp_path / "out.jsonl").read_text()
    found = {answer["custom_id"]: answer for answer in read_rows(tmp_path / "out.jsonl")}
    (choice,) = found["chat"]["response"]["body"]["choices"]
    of_chat = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    (choice,) = found["text"]["response"]["body"]["choices"]
    for values in [*of_chat, *(list(top.values()) for top in choice["logprobs"]["top_logprobs"])]:
        assert values.count(LOWEST_LOGPROB) == len(values) - 2, "two tokens can come"
    for name, field in (("all", "top_logprobs"), ("of prompt", "prompt_logprobs")):
        assert f"{field}: -1 is outside 0 to 20; LLM alone gives" in found[name]["error"]["message"]
    assert found["states"]["error"]["code"] == "unknown_parameter"
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["settings"]["logprobs_mode"] == "processed_logprobs"
    capsys.readouterr()
    write_rows(tmp_path / "rows.jsonl", [*(tmp_path / "rows.jsonl").read_bytes().splitlines(), row("more")])
    assert run() == 2
    assert "logprobs_mode" in capsys.readouterr().err


def test_a_job_has_no_hidden_states(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [row("one")])
    config = RunnerConfig(model=str(SHAPES_VL), platform="cpu", hidden_state_layers=(-1,))
    with pytest.raises(ConfigError, match="hidden_state_layers: rows have no field for them"):
        run_batch(config, BatchOptions(input=str(tmp_path / "rows.jsonl"), output=str(tmp_path / "out.jsonl")))
