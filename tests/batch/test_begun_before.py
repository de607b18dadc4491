"""An output that an earlier version began is finished by this one: each row once, with the same fingerprint (4 s each).

What lies in half_done was killed, or was interrupted after deaths; half_done/__main__.py says how it was begun.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli.main import main
from tests.batch.half_done.__main__ import CREATED, FAILED, NUM_ROWS, OPTIONS, SHORT_OPTIONS
from tests.batch.scripted import read_rows
from tests.full_set import only_full

BEGUN = {path.name: path for path in (Path(__file__).parent / "half_done").iterdir() if path.name.startswith("format")}
NUM_RUNS = {"format_1": 0, "format_2": 0, "format_3_suspects": 1, "format_3_killed": 2, "format_3_retry": 2,
            "format_3_changes": 2, "format_3_earlier": 2}
"""Runs that the files know."""
FAST = "format_1", "format_3_retry"
WITH_SUSPECTS = "format_1", "format_2", "format_3_suspects"
INSTALLED = {"torch": "torch", "prompts.pillow": "pillow", "prompts.tokenizers": "tokenizers"}


def options_of(name: str) -> tuple[str, ...]:
    if name in WITH_SUSPECTS:
        return OPTIONS
    return (*SHORT_OPTIONS, "--error-file", "errors.jsonl", "--seed", "1") if "changes" in name else SHORT_OPTIONS


def fingerprint(manifest: dict[str, Any]) -> str:
    """How the first format made it, written down once more: blake2b over files, weights and settings, by name."""
    lines = {name: json.dumps(value, sort_keys=True) for name, value in manifest["settings"].items()
             if name != "prompts.decoders"}
    lines |= {**manifest["model_files"], **{f"weights.{name}": line for name, line in manifest["weights"].items()}}
    text = "\n".join(f"{name}: {line}" for name, line in sorted(lines.items()))
    return f"fp_{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def as_begun_here(begun: Path, folder: Path) -> dict[str, Any]:
    """A copy of the files, as the earlier version writes them beside the libraries that are installed here."""
    shutil.copytree(begun, folder)
    path = folder / "out.jsonl.manifest.json"
    manifest = json.loads(path.read_text())
    before = fingerprint(manifest)
    answers = (folder / "out.jsonl").read_text()
    settings = manifest["settings"]
    settings |= {name: version(package) for name, package in INSTALLED.items()}
    settings["prompts.decoders"] = {name: version(name) for name in settings["prompts.decoders"]}
    path.write_text(json.dumps(manifest))
    (folder / "out.jsonl").write_text(answers.replace(before, fingerprint(manifest)))
    return dict(manifest)


@pytest.mark.parametrize("name", [*FAST, *only_full(
    "other formats and other ways to be cut short; the first format and a retry under way stay",
    *(name for name in sorted(BEGUN) if name not in FAST))])
def test_an_output_of_an_earlier_version_is_finished(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    manifest = as_begun_here(BEGUN[name], folder)
    files = [path for path in (folder / "out.jsonl", folder / "errors.jsonl") if path.exists()]
    before = {path: b"".join(line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n"))
              for path in files}
    fingerprints = {fingerprint(manifest),
                    *(change["system_fingerprint_before"] for change in manifest.get("changes", ()))}
    assert (name in WITH_SUSPECTS) == (folder / "out.jsonl.suspects.json").exists()
    assert ("retry" in name) == bool(manifest.get("retry")) == (folder / "out.jsonl.replaced.jsonl").exists()
    monkeypatch.chdir(folder)
    command = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", *options_of(name), "--summary", "summary.json"]
    assert main(command) == 3, "some rows fail"
    for path, data in before.items():
        assert path.read_bytes().startswith(data), f"{path.name}: what was there stays as it is"
    rows = [row for path in files for row in read_rows(path)]
    assert sorted(row["custom_id"] for row in rows) == [row["custom_id"] for row in read_rows(folder / "in.jsonl")]
    answers = [row["response"]["body"] for row in rows if row["error"] is None]
    assert {body["system_fingerprint"] for body in answers} == fingerprints
    assert {body["created"] for body in answers} == {CREATED}
    told = json.loads((folder / "summary.json").read_text())
    assert len(told["runs"]) == NUM_RUNS[name] + 1
    assert [run["end"] for run in told["runs"]][-1] == "finished"
    assert (told["rows"]["answered"], told["rows"]["failed"]) == (NUM_ROWS - len(FAILED), len(FAILED))
    assert told["rows"]["answered"] == told["rows"]["unrecorded"] + sum(
        run["tally"]["num_answered"] for run in told["runs"]) or "retry" in name
    assert "retry" not in json.loads((folder / "out.jsonl.manifest.json").read_text())
    beside = {path.name.removeprefix("out.jsonl.") for path in folder.iterdir()} - {path.name for path in files}
    assert beside - {"in.jsonl", "summary.json", "replaced.jsonl"} == {"manifest.json", "rows", "status.json"}
    assert not json.loads((folder / "out.jsonl.manifest.json").read_text()).get("suspects")


@pytest.mark.parametrize("name", [FAST[0], *only_full("later formats; the first stays, and all are finished above",
                                                      *(name for name in sorted(BEGUN) if name != FAST[0]))])
def test_other_settings_are_still_told_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job"
    as_begun_here(BEGUN[name], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    assert main(["batch", "-i", "in.jsonl", "-o", "out.jsonl", *options_of(name), "--image-max-pixels", "50176"]) == 2
    assert "Changed: prompts.image_settings: was {" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
