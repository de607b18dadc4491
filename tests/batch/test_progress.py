"""What a person sees while a job runs: how far, how fast over all and lately, how long still, and what went wrong."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
from collections import Counter
from pathlib import Path

import pytest

from npu_runner.batch.job import progress
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.summary import Tally
from npu_runner.request.outputs import EngineStats
from tests.batch.job_folder import Job
from tests.batch.scripted import row, write_rows

TALLY = Tally(num_answered=300, num_failed=3, failures_by_code=Counter(media_missing=2, not_json=1), num_cut_off=7)
STATS = EngineStats(num_prefill_tokens=40_000, num_decode_tokens=9_000, num_running=128, num_waiting=44)


def test_a_line_has_a_rate_over_all_and_lately_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    shown = Progress("lines", out)
    shown.start(1100, 100)
    for now, num_answered in ((1010.0, 0), (1050.0, 400), (1100.0, 500), (1200.0, 1000)):
        shown.update(Tally(num_answered=num_answered), EngineStats, is_last=now == 1200.0)
    paces = [line.split(", 0 failed")[0] for line in out.getvalue().splitlines()]
    assert paces == [
        "100/1100 rows, 0.00 rows/s (lately 0.00)",
        "500/1100 rows, 01:15 left, 8.00 rows/s (lately 10.00)",
        "600/1100 rows, 01:40 left, 5.00 rows/s (lately 2.00)",
        "1100/1100 rows, 5.00 rows/s (lately 5.00)",
    ]
    shown.update(TALLY, lambda: STATS, is_last=True)
    assert "3 failed (2 media_missing, 1 not_json), cut off 7, decode " in out.getvalue()


@pytest.mark.parametrize(("width", "seen", "unseen"), [
    (60, [], ["failed"]), (90, ["3 failed, cut off 7"], ["running"]),
    (220, ["3 failed, cut off 7", "decode", "prefill", "128 running, 44 waiting"], []),
])  # fmt: skip
def test_a_bar_leaves_out_what_has_no_room_and_cuts_nothing(width: int, seen: list[str], unseen: list[str]) -> None:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        shown = Progress("bar", terminal)
        shown.start(1000, 100)
        shown.update(TALLY, lambda: STATS, is_last=True)
        shown.close()
    pieces = []
    with contextlib.suppress(OSError):  # the terminal's end
        while piece := os.read(reader, 1 << 16):
            pieces.append(piece)
    os.close(reader)
    drawn = b"".join(pieces).decode().split("\r")
    last = next(line for line in reversed(drawn) if "403/1000" in line).rstrip()
    assert last.startswith(" 40%|")
    assert last.endswith("]")
    assert len(last) <= width
    assert all(words in last for words in seen)
    assert not any(words in last for words in unseen)


def test_a_job_without_progress_still_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else nobody hears that answers were cut off."""
    job = Job(tmp_path)
    write_rows(job.input, [row("a"), row("b", "bad")])
    job.run(progress="off")
    first, *_ = lines = capsys.readouterr().err.splitlines()
    assert first == "rows      1 answered, 1 failed (1 scripted_bad)"
    assert all(line.startswith(("rows ", "tokens ", "time ", "caches ", "KV cache ", "in all ")) for line in lines)
