"""A full disk under `rows`, `table` and `merge`: one line says so, and what was there before stays.

A limit on the size of files stands for the disk; on a full tmpfs the same lines run (tests/batch/test_full_disk.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_runner.cli import main as cli
from tests import zygote
from tests.batch.mounts import mounted
from tests.batch.scripted import write_rows
from tests.tables.made import answered, completion, embedded

PIXEL = bytes.fromhex("47494638396101000100800000000000ffffff2c00000000010001000002024401003b")
COMMANDS = [
    ["table", "a.jsonl", "-o", "t.csv"], ["table", "a.jsonl", "-o", "t.jsonl"], ["table", "a.jsonl", "-o", "t.parquet"],
    ["table", "v.jsonl", "-o", "t.npy"], ["merge", "a.jsonl", "b.jsonl", "-o", "m.jsonl"],
    ["merge", "a.jsonl", "b.jsonl", "--dropped", "d.jsonl", "-o", "m.jsonl"],
    ["rows", "q.jsonl", "--prompt", "?", "--keep", "q", "-o", "r.jsonl"],
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in "ab":
        lines = [answered(f"r{number}", completion(os.urandom(100).hex())) for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines))
    vectors = [embedded(f"r{number}", [float(number)] * 64) for number in range(200)]
    (tmp_path / "v.jsonl").write_bytes(b"".join(vectors))
    write_rows(tmp_path / "q.jsonl", [{"q": "x" * 300, "n": number} for number in range(200)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert sys.dont_write_bytecode, "Python would keep half a module"
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line_and_the_file_of_before_stays(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder / command[-1]
    output.write_text("old")
    before = sorted(os.listdir(folder))
    with files_up_to(4096):
        assert cli.main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("npu-runner: ")
    assert f" {output.name}: File too large; when that is mended run the same command again" in line
    assert (output.read_text(), sorted(os.listdir(folder))) == ("old", before)


def test_a_disk_that_is_full_of_media_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    images = [{"bytes": PIXEL + os.urandom(3000), "path": None} for _ in range(60)]
    pd.DataFrame({"image": images}).to_parquet("t.parquet")
    (folder / "media").mkdir()
    with mounted(folder / "media", "size=100k"):
        assert cli.main(["rows", "t.parquet", "--prompt", "?", "--media-dir", "media", "-o", "r.jsonl"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("npu-runner: media_dir ")
        assert line.endswith("media: No space left on device; make room and run the same command again")
        assert not list((folder / "media").rglob("*.new"))
    assert not (folder / "r.jsonl").exists()


@pytest.mark.parametrize(
    "command", [["models"], ["summary", "--help"], ["rows", "q.jsonl", "--prompt", "?", "-o", "-"]], ids=" ".join
)
def test_a_full_device_is_one_line(command: list[str], folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = zygote.run(
            [sys.executable, "-m", "npu_runner", *command], cwd=folder, stdout=full, stderr=subprocess.PIPE
        )
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert len(lines) == 1, lines
    assert "standard output: No space left on device; make room and run the same command again" in lines[0]
