"""A job whose answers may not repeat themselves: by options for all rows, by fields for one, and when it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli import main as cli
from tests.batch.scripted import completion_row, read_rows, row, write_rows

SMALL = ["--platform", "cpu", "--max-model-len", "256", "--kv-cache-bytes", "16M", "--progress", "off"]
DETECTION = {"max_pattern_size": 20, "min_count": 3}
GUARDS = ["--repetition-detection", json.dumps(DETECTION), "--no-repeat-ngram-size", "12",
          "--no-repeat-ngram-window", "40", "--no-repeat-ngram-exempt-ids", "5,6"]  # fmt: skip
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
OFF = {"repetition_detection": {"max_pattern_size": 0}}
ROWS = {
    "job's": completion_row("job's", "circle", **ASKED),
    "longer patterns": completion_row("longer patterns", "circle", **ASKED, repetition_detection={
        **DETECTION, "min_pattern_size": 9}),
    "off": completion_row("off", "circle", **ASKED, **OFF),
    "pairs": completion_row("pairs", "circle", **ASKED, **OFF, no_repeat_ngram_size=2),
    "no ban": completion_row("no ban", "circle", **ASKED, **OFF, no_repeat_ngram_size=0, logprobs=0),
    "chat": row("chat", "circle", **ASKED, n=2),
    "wrong": completion_row("wrong", "circle", **ASKED, no_repeat_ngram_size=41),
}  # fmt: skip


def run(folder: Path, *arguments: str) -> int:
    return cli.main(["batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--summary",
                     str(folder / "sums.json"), *SMALL, *arguments])  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    write_rows(folder / "in.jsonl", list(ROWS.values()))
    assert run(folder, *GUARDS) == 3
    return folder


def ends(folder: Path) -> dict[str, tuple[str, str | None]]:
    first = {item["custom_id"]: item["response"]["body"]["choices"][0] for item in read_rows(folder / "out.jsonl")
             if item["error"] is None}  # fmt: skip
    return {name: (choice["finish_reason"], choice.get("stop_reason")) for name, choice in first.items()}


def test_options_are_for_rows_that_say_nothing(finished: Path) -> None:
    cut, repeated = ("length", None), ("length", "repetition_detected")
    assert ends(finished) == {"job's": repeated, "longer patterns": cut, "off": cut, "pairs": cut, "no ban": cut,
                              "chat": ends(finished)["chat"]}  # fmt: skip
    found = {item["custom_id"]: item for item in read_rows(finished / "out.jsonl")}
    assert found["wrong"]["error"]["message"].startswith("no_repeat_ngram_window: 40 is shorter than")
    texts = {name: found[name]["response"]["body"]["choices"][0]["text"] for name in ("off", "pairs", "no ban")}
    assert texts["pairs"] != texts["off"]
    rows = json.loads((finished / "sums.json").read_text())["rows"]
    assert rows["repetition"] == sum(end == repeated for end in ends(finished).values())


@pytest.mark.full("another start of the model; resumed jobs stay (test_job.py), and what guards do in one run")
def test_a_job_that_goes_on_counts_and_ends_as_an_undisturbed_one(finished: Path, tmp_path: Path) -> None:
    for path in finished.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    lines = (finished / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[::2]))
    assert run(tmp_path, *GUARDS) == 3
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)
    rows = [json.loads((folder / "sums.json").read_text())["rows"] for folder in (finished, tmp_path)]
    assert rows[0]["repetition"] == rows[1]["repetition"] > 0


@pytest.mark.parametrize(("options", "message"), [
    ([*GUARDS[:2], "--no-repeat-ngram-size", "13", *GUARDS[4:]], "answers.no_repeat_ngram_size: was 12"),
    (["--overwrite", "--no-repeat-ngram-size", "1"], "no_repeat_ngram_size: 1 lets no token come twice"),
    (["--overwrite", "--repetition-detection", '{"max_pattern_size": 4}'],
     "repetition_detection.min_count: 0 is less than 2"),
    (["--overwrite", "--repetition-detection", "[4]"], "argument --repetition-detection: '[4]' is not a JSON object"),
])  # fmt: skip
def test_other_or_wrong_options_are_refused_by_name(finished: Path, options: list[str], message: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "out.jsonl").read_bytes()
    retry = [] if "--overwrite" in options else ["--retry-errors"]
    try:
        status = run(finished, *retry, *options)
    except SystemExit as error:  # argparse
        status = int(str(error.code))
    assert status == 2
    assert message in capsys.readouterr().err
    assert (finished / "out.jsonl").read_bytes() == before
