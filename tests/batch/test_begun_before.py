"""An output that an earlier version began is finished by this one: each row once, with the same fingerprint (9 s)."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli.main import main
from tests.batch.half_done.__main__ import CREATED, OPTIONS
from tests.batch.scripted import read_rows
from tests.full_set import only_full

BEGUN = sorted(path for path in (Path(__file__).parent / "half_done").iterdir() if path.name.startswith("format"))
INSTALLED = {"torch": "torch", "prompts.pillow": "pillow", "prompts.tokenizers": "tokenizers"}


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
    assert {row["response"]["body"]["system_fingerprint"] for row in read_rows(folder / "out.jsonl")} == {before}
    settings = manifest["settings"]
    settings |= {name: version(package) for name, package in INSTALLED.items()}
    settings["prompts.decoders"] = {name: version(name) for name in settings["prompts.decoders"]}
    path.write_text(json.dumps(manifest))
    (folder / "out.jsonl").write_text(answers.replace(before, fingerprint(manifest)))
    return dict(manifest)


@pytest.mark.parametrize("begun", [BEGUN[0], *only_full("the later format; the first stays, and both are read below",
                                                         *BEGUN[1:])], ids=lambda path: path.name)
def test_an_output_of_an_earlier_version_is_finished(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    manifest = as_begun_here(begun, folder)
    output, errors = folder / "out.jsonl", folder / "errors.jsonl"
    before = {path: path.read_bytes() for path in (output, errors)}
    num_suspects = len(json.loads((folder / "out.jsonl.suspects.json").read_text())["rows"])
    assert num_suspects > 1
    monkeypatch.chdir(folder)
    assert main(["batch", "-i", "in.jsonl", "-o", "out.jsonl", *OPTIONS]) == 3, "some rows fail"
    for path, data in before.items():
        assert path.read_bytes().startswith(data), f"{path.name}: what was there stays as it is"
    asked = [row["custom_id"] for row in read_rows(folder / "in.jsonl")]
    assert sorted(row["custom_id"] for path in before for row in read_rows(path)) == asked
    bodies = [row["response"]["body"] for row in read_rows(output)]
    assert {body["system_fingerprint"] for body in bodies} == {fingerprint(manifest)}
    assert {body["created"] for body in bodies} == {CREATED}
    assert not (folder / "out.jsonl.suspects.json").exists()


@pytest.mark.parametrize("begun", BEGUN, ids=lambda path: path.name)
def test_other_settings_are_still_told_by_name(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job"
    as_begun_here(begun, folder)
    monkeypatch.chdir(folder)
    assert main(["batch", "-i", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--image-max-pixels", "50176"]) == 2
    assert "Changed: prompts.image_settings: was {" in capsys.readouterr().err
