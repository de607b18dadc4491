"""A job with drafts: the answers of one without, and a manifest that names the setting; killed and resumed, too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli import main as cli
from scripts.shapes.drawing import TEST_SEEDS, draw_json_example
from tests.batch.scripted import row, write_rows
from tests.faults.killed_jobs import is_over, started, wait_for_rows, whole_lines

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off",
         "--preprocessing-workers", "1", "--allowed-media-dir", "."]  # fmt: skip
NGRAM = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}']
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']
HYBRID = ["--model", "shapes-hybrid"]
NUM_KILLS = 6
METHODS = pytest.mark.parametrize(("model", "drafts"), [([], NGRAM), (HYBRID, MTP)], ids=["ngram", "mtp"])


def requests(folder: Path, count: int) -> list[dict[str, Any]]:
    """Images with a schema, and drawn text with a seed and without. No log probabilities: their last digits depend on
    how many tokens a step has."""
    rows = []
    for number in range(count):
        example = draw_json_example(TEST_SEEDS[300 + number])
        example.images[0].save(folder / f"{number}.png")
        parts = [{"type": "text", "text": example.question},
                 {"type": "image_url", "image_url": {"url": f"{number}.png"}}]
        rule = {"type": "json_schema", "json_schema": {"name": "shape", "schema": example.schema}}
        rows.append(row(f"image {number}", messages=[{"role": "user", "content": parts}], max_tokens=48,
                        response_format=rule))
        rows.append(row(f"text {number}", "Hello!", temperature=number % 2, n=1 + number % 3, max_tokens=16))
    return rows


def content(lines: list[bytes]) -> list[dict[str, Any]]:
    """Answers by name, without what names the settings."""
    found = [json.loads(line) for line in lines]
    for item in found:
        del item["response"]["body"]["system_fingerprint"]
    return sorted(found, key=lambda item: str(item["custom_id"]))


@pytest.mark.full("three starts; drafts of LLM stay, whose settings a job has (runner/test_several_tokens.py)")
def test_a_job_with_drafts_answers_as_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", requests(tmp_path, 4))
    command = ["batch", "-i", "in.jsonl", *SMALL, "-o"]
    assert cli.main([*command, "plain.jsonl", "--ordered"]) == 0
    report = ["--summary", "sums.json", "--report", "page.html"]
    assert cli.main([*command, "drafted.jsonl", "--ordered", *NGRAM, *report]) == 0
    assert content(whole_lines(tmp_path / "drafted.jsonl")) == content(whole_lines(tmp_path / "plain.jsonl"))
    sums = json.loads((tmp_path / "sums.json").read_text())
    drafts = sums["this_run"]["drafts"]
    assert drafts["by_method"]["forced"]["accepted"] > 0
    assert drafts["proposed"] == sums["tokens"]["draft_proposed"] > sums["tokens"]["draft_accepted"] > 0
    assert "accepted drafts" in (tmp_path / "page.html").read_text()
    settings = json.loads((tmp_path / "drafted.jsonl.manifest.json").read_text())["settings"]
    assert json.loads(settings["speculative_config"]) == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    assert "speculative_config" not in json.loads((tmp_path / "plain.jsonl.manifest.json").read_text())["settings"]
    write_rows(tmp_path / "in.jsonl", [*requests(tmp_path, 4), row("one more", "Hello!")])
    capsys.readouterr()
    assert cli.main([*command, "drafted.jsonl"]) == 2
    assert "--accept-changed speculative_config" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.full("a job is killed and resumed again and again; one that runs through stays")
@METHODS
def test_a_job_with_drafts_that_is_killed_leaves_every_row_once(
    model: list[str], drafts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the answer of a job without drafts. Rows that are appended in the end are left to the last run."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = requests(tmp_path, 10)
    write_rows(tmp_path / "in.jsonl", rows)
    command = ["batch", "-i", "in.jsonl", *SMALL, *model, "-o"]
    assert started([*command, "plain.jsonl"], tmp_path).wait() == 0
    expected = content(whole_lines(tmp_path / "plain.jsonl"))
    assert [item["custom_id"] for item in expected] == sorted(item["custom_id"] for item in rows)
    output, rng, num_kills = tmp_path / "out.jsonl", random.Random(3), 0
    command += [output.name, *drafts, "--summary", "sums.json", "--max-num-seqs", "2"]  # few rows end together
    write_rows(tmp_path / "in.jsonl", rows[:16])
    for _ in range(NUM_KILLS):
        job = started(command, tmp_path)
        wait_for_rows(job.pid, output, len(whole_lines(output)) + rng.randint(1, 3))
        num_kills += not is_over(job.pid)
        job.kill()
        job.wait()
        assert all(item in expected for item in content(whole_lines(output)))
    assert num_kills > 2
    write_rows(tmp_path / "in.jsonl", rows)
    assert started(command, tmp_path).wait() == 0
    assert content(whole_lines(output)) == expected
    assert json.loads((tmp_path / "sums.json").read_text())["tokens"]["draft_accepted"] > 0


@pytest.mark.slow
@pytest.mark.full("two replicas load the model; one engine stays, and a replica is one")
@METHODS
def test_two_replicas_with_drafts_answer_as_one_without(model: list[str], drafts: list[str], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_rows(tmp_path / "in.jsonl", requests(tmp_path, 8))
    command = ["batch", "-i", "in.jsonl", *SMALL, *model, "-o"]
    assert started([*command, "plain.jsonl"], tmp_path).wait() == 0
    replicas = ["--data-parallel-size", "2", "--summary", "sums.json"]
    assert started([*command, "drafted.jsonl", *drafts, *replicas], tmp_path).wait() == 0
    assert content(whole_lines(tmp_path / "drafted.jsonl")) == content(whole_lines(tmp_path / "plain.jsonl"))
    found = json.loads((tmp_path / "sums.json").read_text())["this_run"]["drafts"]
    assert found["accepted"] > 0
    assert found["by_method"][json.loads(drafts[1])["method"]]["proposed"] > 0
