"""The output file: wherever it was cut or damaged, its whole rows are kept and nothing else."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import replacing
from npu_runner.batch.files.output_lock import OutputLock
from npu_runner.batch.rows.openai_response import error_row
from npu_runner.batch.rows.shape import row_key
from npu_runner.errors import ConfigError, JobError, RequestError
from tests import zygote

ANSWER = b'{"id":"x","custom_id":"%s","response":{"status_code":200},"error":null}\n'


def a_row(index: int, failed: bool) -> bytes:
    if not failed:
        return ANSWER % f"row {index} \N{SNOWMAN}".encode()
    name = None if index % 2 else f"row {index} \N{SNOWMAN}"
    return error_row(RequestError(code="c", message="m\n"), custom_id=name, line=index + 1)


def scanned(path: Path) -> AnswerFile:
    with AnswerFile([path]) as rows:
        return rows.scan()


def repaired(path: Path, *, drops_failed: bool = False) -> AnswerFile:
    """What the file holds once only whole rows are left in it, and of these only answers with `drops_failed`."""
    with AnswerFile([path]) as rows:
        rows.scan()
        rows.rewrite(0, np.flatnonzero(~(rows.failed_A & drops_failed)))
    return scanned(path)


ROWS = st.lists(st.booleans(), max_size=8).map(lambda flags: [a_row(i, failed) for i, failed in enumerate(flags)])


@given(rows=ROWS, data=st.data())
def test_cut_anywhere_the_whole_rows_are_kept(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data
) -> None:
    path = tmp_path_factory.mktemp("output") / "out.jsonl"
    everything = b"".join(rows)
    cut = data.draw(st.integers(0, len(everything)))
    path.write_bytes(everything[:cut])
    repaired(path)
    assert path.read_bytes() == everything[: everything.rfind(b"\n", 0, cut) + 1]


@given(rows=ROWS, data=st.data())
def test_whatever_is_between_the_rows_the_rows_are_kept_once(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data
) -> None:
    path = tmp_path_factory.mktemp("output") / "out.jsonl"
    # A power cut leaves blocks of zeros; people leave anything; a row that stands twice counts once.
    rubbish = st.sampled_from(
        [b"\0" * 600 + b"\n", b"{}\n", b"[1]\n", b"\xff\n", b"\n", b'{"custom_id":null,"error":{}}\n']
    )
    lines = []
    for line in rows:
        lines += [*data.draw(st.lists(st.one_of(rubbish, st.just(line)), max_size=2)), line]
    path.write_bytes(b"".join(lines))
    scan = repaired(path)
    assert path.read_bytes() == b"".join(rows)
    assert (scan.num_rows, scan.broken, scan.torn) == (len(rows), [], [])


@given(flags=st.lists(st.booleans(), max_size=8))
def test_failed_rows_are_dropped_when_they_are_tried_again(
    tmp_path_factory: pytest.TempPathFactory, flags: list[bool]
) -> None:
    path = tmp_path_factory.mktemp("output") / "out.jsonl"
    path.write_bytes(b"".join(a_row(i, failed) for i, failed in enumerate(flags)))
    assert list(scanned(path).failed_A) == flags
    assert repaired(path, drops_failed=True).num_rows == flags.count(False)
    assert path.read_bytes() == b"".join(a_row(i, failed) for i, failed in enumerate(flags) if not failed)


STATUS_500 = b'{"custom_id":"a","response":{"status_code":500,"body":{"error":{"code":"down"}}},"error":null}\n'
OF_A = {"answer": ANSWER % b"a", "later answer": (ANSWER % b"a").replace(b'"x"', b'"y"'), "status": STATUS_500,
        "failure": error_row(RequestError(code="c", message="m"), custom_id="a", line=1)}


def test_the_code_of_a_failure_is_in_its_error_or_its_response(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(STATUS_500 + a_row(1, True) + STATUS_500.replace(b'"a"', b'"b"').replace(b'"code"', b'"kind"'))
    assert scanned(path).counts().failures_by_code == {"down": 1, "c": 1, "unknown": 1}


@pytest.mark.parametrize("number", ["1e999", "NaN", "-1e999", '"x"', "[]"])
def test_a_line_number_that_is_none_makes_no_result_row(tmp_path: Path, number: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"custom_id": null, "response": null, "error": {"code": "x", "line": NUMBER}}\n'.replace(
        "NUMBER", number))
    assert len(scanned(path).broken) == 1


def test_rows_are_named_as_the_input_names_them(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(a_row(0, False) + a_row(1, True))
    assert list(scanned(path).keys_A) == [row_key("row 0 \N{SNOWMAN}", 99), row_key(None, 2)]


def test_a_whole_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(a_row(0, False))
    before = path.stat()
    repaired(path, drops_failed=True)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_rows_can_be_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(a_row(i, False) for i in (2, 0, 1)))
    path.chmod(0o640)
    with AnswerFile([path]) as rows:
        rows.scan().rewrite(0, np.array([1, 2, 0]))
    assert path.read_bytes() == b"".join(a_row(i, False) for i in (0, 1, 2))
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_fails_to_be_replaced_stays_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", None])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_second_job_is_refused_and_told_the_pid(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    hold = "import sys,pathlib\nfrom npu_runner.batch.files.output_lock import OutputLock\n"
    hold += "with OutputLock(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    with zygote.Popen(
        [sys.executable, "-c", hold, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"\(pid {holder.pid}\)"), OutputLock(output):
            pass
        holder.kill()
    with OutputLock(output):  # a dead holder's lock is free, though its file is still there
        assert (tmp_path / "out.jsonl.lock").read_text() == f"{os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_taken_once_the_children_of_a_holder_that_is_gone_let_go(tmp_path: Path) -> None:
    """A process that ends while a thread of its starts another one leaves a child with all that it has open."""
    output = tmp_path / "out.jsonl"
    hold = "import os,pathlib,subprocess,sys\nfrom npu_runner.batch.files.output_lock import OutputLock\n"
    hold += "lock = OutputLock(pathlib.Path(sys.argv[1])).__enter__()\n"
    hold += "subprocess.Popen(['sleep', '0.5'], pass_fds=[lock._descriptor])\nos._exit(0)"
    zygote.run([sys.executable, "-c", hold, str(output)], check=True)
    with OutputLock(output):
        assert (tmp_path / "out.jsonl.lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_file_that_vanishes_under_us_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl.lock"
    really_lock, calls = fcntl.flock, []

    def lock_after_the_holder_left(descriptor: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            path.unlink()
        really_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_holder_left)
    with OutputLock(tmp_path / "out.jsonl"):
        assert len(calls) == 2
        assert path.exists()


def test_a_full_disk_leaves_whole_rows_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    script = f"""
import os, resource, sys
from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.errors import JobError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = AnswerWriter(os.open({str(path)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "out.jsonl")
try:
    for index in range(10000):
        writer.put(b'%06d' % index + b'x' * 93 + b'\\n')
    writer.close()
except JobError as error:
    print(error)
    sys.exit(0 if "out.jsonl: File too large" in str(error) else 1)
sys.exit(2)
"""
    done = zygote.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    data = path.read_bytes()
    assert data.endswith(b"\n")
    assert 0 < len(data) <= 1000
    assert [line[:6] for line in data.splitlines()] == [b"%06d" % index for index in range(len(data) // 100)]


def test_a_device_without_room_fails_the_job() -> None:
    writer = AnswerWriter(os.open("/dev/full", os.O_WRONLY), "/dev/full")
    writer.put(b"row\n")
    with pytest.raises(JobError, match="No space left on device; make room and run the same command again"):
        writer.close()


def test_rows_reach_the_file_without_waiting_for_a_group(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = AnswerWriter(os.open(path, os.O_WRONLY | os.O_CREAT), "out", sync_rows=10**6, sync_seconds=10**6)
    writer.put(b"row\n")
    while path.read_bytes() != b"row\n":  # the test's own timeout ends this if it never comes
        os.sched_yield()
    writer.close()


def test_rows_that_wait_for_a_slow_reader_are_bounded_by_their_bytes() -> None:
    reader, descriptor = os.pipe()
    writer, row, accepted = AnswerWriter(descriptor, "a pipe"), b"x" * ((4 << 20) - 1) + b"\n", []

    def put_all() -> None:
        for _ in range(40):
            writer.put(row)
            accepted.append(len(row))
        writer.close()

    thread = threading.Thread(target=put_all)
    thread.start()
    # What fits while nobody reads: 64 MiB of rows, the one being written among them.
    while (before := len(accepted)) < 16:
        time.sleep(0.01)
    thread.join(0.5)
    assert before <= len(accepted) <= 17
    received = 0
    while data := os.read(reader, 1 << 20):
        received += len(data)
    thread.join()
    assert received == 40 * len(row)
