"""A compressed input gives the rows of what it holds, or is refused. Made by gzip, zstandard, lzma and zipfile."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import lzma
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.replica_plan import planned_replicas
from npu_runner.batch.job.row_server import CheckpointSide
from npu_runner.cli import main as cli
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError
from tests.batch.job_folder import LEFT, Job, numbered
from tests.batch.mounts import mounted
from tests.batch.scripted import row, write_rows
from tests.full_set import only_full

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor(write_checksum=True).compress}  # as the command writes it
ROWS = b"".join(b'{"custom_id": "%d"}\n' % number for number in range(20_000))


def rows_of(path: Path) -> list[bytes]:
    with InputFile(str(path), path.parent) as file:
        return [file.source.read(row) for row in file.rows()]


@pytest.mark.parametrize("kind", PACK)
@given(parts=st.lists(st.binary(max_size=9000), min_size=1, max_size=3), padding=st.integers(0, 5000))
def test_members_behind_one_another_are_one_input(
    tmp_path_factory: pytest.TempPathFactory, kind: str, parts: list[bytes], padding: int
) -> None:
    """Zeros behind the last member are padding, as gzip has it."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "plain").write_bytes(b'{"custom_id": "a"}\n' + b"".join(parts))
    whole = (folder / "plain").read_bytes()
    pieces = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    (folder / "packed").write_bytes(b"".join(map(PACK[kind], pieces)) + bytes(padding))
    with InputFile(str(folder / "packed"), folder) as packed, InputFile(str(folder / "plain"), folder) as plain:
        descriptors = packed.source.descriptor, plain.source.descriptor
        assert os.pread(descriptors[0], len(whole) + 1, 0) == os.pread(descriptors[1], len(whole) + 1, 0) == whole
    assert {path.name for path in folder.iterdir()} == {"plain", "packed"}


@pytest.mark.parametrize("kind", PACK)
def test_an_input_that_is_broken_or_cut_short_is_refused(tmp_path: Path, kind: str) -> None:
    path, data = tmp_path / "in.jsonl", PACK[kind](ROWS)
    broken = bytearray(data)
    broken[len(data) // 2] ^= 0xFF
    for bad, message in ((data[:-1], "it ends too early"), (data[: len(data) // 2], "it ends too early"),
                         (bytes(broken), "its data are broken"), (data + b"rest", "its data are broken")):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=f"input {path}: it is {kind}, and {message}.*; write it again"):
            InputFile(str(path), tmp_path)
    path.write_bytes(data)
    assert b"".join(rows_of(path)) == ROWS


def test_formats_that_are_not_read_are_refused_with_the_command_that_unpacks_them(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"  # the name says nothing of it
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.writestr("in.jsonl", b"{}")
    for kind, data in {"xz": lzma.compress(b"{}"), "zip": (tmp_path / "zipped").read_bytes()}.items():
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"in.jsonl: it is {kind}, and .*; unpack it: .* {path} >"):
            InputFile(str(path), tmp_path)


def test_standard_input_may_be_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(ROWS))))
    with InputFile("-", tmp_path) as file:
        assert file.scan().num_rows == 20_000


@pytest.fixture
def begun(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that has ended, in the folder that commands start in, and its input packed, too."""
    write_rows(job.input, [row(name, os.urandom(4000).hex()) for name in numbered(40)])
    job.run()
    job.input.with_name("in.jsonl.gz").write_bytes(gzip.compress(job.input.read_bytes()))
    monkeypatch.chdir(job.folder)
    return job


@pytest.mark.parametrize("command", ["summary", "report", *only_full("all rows are prepared twice", "check")])
def test_what_only_looks_unpacks_into_the_folder_for_temporary_files_and_leaves_room_there(
    begun: Job, tmp_path_factory: pytest.TempPathFactory, command: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    spare = tmp_path_factory.mktemp("spare")
    size = begun.input.stat().st_size
    commands = {"summary": ["out.jsonl", "--input"], "report": ["out.jsonl", "-o", "p.html", "--input"],
                "check": ["--platform", "cpu"]}  # fmt: skip
    for more, has_room in ((2 * size, True), (size // 2, False)):
        with mounted(spare, f"size={((1 << 30) + more) >> 12 << 2}k"):
            monkeypatch.setattr(tempfile, "tempdir", str(spare))
            assert (cli.main([command, *commands[command], "in.jsonl.gz"]) == 1) != has_room
            gc.collect()  # tracebacks hold files
    errors = capsys.readouterr().err.splitlines()[-1]
    found = re.search(r"^npu-runner: input in.jsonl.gz, its copy in the folder for temporary files: has (\d+) bytes so "
                      r"far, and with more of them less than 1 GiB would be left free there; .* TMPDIR$", errors)
    assert found, errors
    assert size // 4 < int(found[1]) <= size // 2


def test_a_job_that_unpacks_its_input_beside_its_output_leaves_room_there(
    begun: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    for size, is_refused in ((1025, False), (1023, True)):
        refused = pytest.raises(JobError, match=f"its copy in {disk}: has 0 bytes .* room$")
        with mounted(disk, f"size={size}M"), refused if is_refused else contextlib.nullcontext():
            begun.run(input="in.jsonl.gz", output=str(disk / "a.jsonl"))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python has zstd itself")
def test_a_missing_package_is_named_with_another_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "in.jsonl").write_bytes(zstandard.compress(ROWS))
    with pytest.raises(ConfigError, match="zstandard is not installed; pip install zstandard, or unpack it: unzstd -c"):
        InputFile(str(tmp_path / "in.jsonl"), tmp_path)


def test_a_job_goes_on_whether_its_input_is_packed_or_not(tmp_path: Path) -> None:
    job = Job(tmp_path)
    write_rows(job.input, [row(name) for name in numbered(6)])
    whole = job.input.read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"".join(whole.splitlines(keepends=True)[:4])))
    assert job.run(input=str(tmp_path / "in.jsonl.gz")).exit_status == 0
    (tmp_path / "in.jsonl.gz").unlink()
    summary = job.run()
    assert summary.num_resumed == 4
    assert sorted(job.names()) == numbered(6)
    assert job.files() == LEFT


def test_other_hosts_do_not_read_rows_where_they_are_not(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS))
    options = BatchOptions(input=str(path), output="-", ray="auto", shared_input=True)
    with InputFile(str(path), tmp_path) as file, pytest.raises(ConfigError, match="is compressed, and other hosts"):
        planned_replicas(RunnerConfig(model=str(tmp_path)), options, file.source, CheckpointSide).__enter__()
