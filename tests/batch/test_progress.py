"""What a person sees while a job runs: how far, how fast over all and lately, how long still, and what went wrong."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import random
import struct
import termios
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from npu_runner.batch.job import progress
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.rows.counts import Counts
from npu_runner.request.outputs import EngineStats
from tests.batch.job_folder import Job
from tests.batch.scripted import row, write_rows

TALLY = Counts(num_answered=300, failures_by_code=Counter(media_missing=2, not_json=1), num_cut_off=7,
               num_not_whole=7)
STATS = EngineStats(num_prefill_tokens=40_000, num_decode_tokens=9_000, num_running=128, num_waiting=44)


def test_a_line_has_a_rate_over_all_and_lately_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    shown = Progress("lines", out)
    shown.start(1100, 100)
    for now, num_answered in ((1010.0, 0), (1050.0, 400), (1100.0, 500), (1200.0, 1000)):
        shown.update(Counts(num_answered=num_answered), EngineStats, is_last=now == 1200.0)
    paces = [line.split(", 0 failed")[0] for line in out.getvalue().splitlines()]
    assert paces == [
        "100/1100 rows, 0.00 rows/s (lately 0.00)",
        "500/1100 rows, 01:15 left, 8.00 rows/s (lately 10.00)",
        "600/1100 rows, 01:40 left, 5.00 rows/s (lately 2.00)",
        "1100/1100 rows, 5.00 rows/s (lately 5.00)",
    ]
    shown.update(TALLY, lambda: STATS, is_last=True)
    assert "3 failed (2 media_missing, 1 not_json), cut off 7, whole 293, decode " in out.getvalue()


def steps(num_rows: int, num_slots: int, num_samples: int) -> Iterator[tuple[int, Counts, EngineStats, float, float]]:
    """Continuous batching by its definition: a slot that is free takes the next row, and each step gives each row that
    is in flight a token. After each step while rows wait: rows left, counts, seconds so far, seconds until the end."""
    lengths = [random.Random(number).randint(20, 60) * num_samples for number in range(num_rows)]
    waiting, running, moments = list(lengths), [], []
    tally = Counts()
    num_tokens = 0
    while waiting or running:
        while waiting and len(running) * num_samples < num_slots:
            length = waiting.pop(0)
            running.append([length, length])
        num_tokens += len(running) * num_samples
        for request in running:
            request[0] -= num_samples
        for request in [each for each in running if not each[0]]:
            running.remove(request)
            tally = replace(tally, num_answered=tally.num_answered + 1,
                            num_completion_tokens=tally.num_completion_tokens + request[1])
        stats = EngineStats(num_running=len(running) * num_samples, num_decode_tokens=num_tokens)
        moments.append((len(waiting), len(running), tally, stats))
    for seconds, (num_waiting, num_running, tally, stats) in enumerate(moments, 1):
        if num_waiting:
            yield num_waiting + num_running, tally, stats, float(seconds), float(len(moments) - seconds)


@pytest.mark.parametrize(("num_rows", "num_slots", "num_samples"), [(300, 256, 1), (300, 256, 4), (3000, 128, 1)])
def test_the_time_left_is_near_the_truth_from_the_first_answer_on(
    num_rows: int, num_slots: int, num_samples: int
) -> None:
    num_told = 0
    for num_left, tally, stats, seconds, truth in steps(num_rows, num_slots, num_samples):
        said = tally.seconds_left(num_left, stats, seconds)
        assert (said is None) == (not tally.num_answered)
        if said is not None:
            num_told += 1
            assert truth / 2.5 < said < truth * 2.5, f"{said:.0f} seconds at {seconds:.0f}, and it takes {truth:.0f}"
    assert num_told > 5


def test_without_tokens_whole_rows_are_the_pace() -> None:
    """Embeddings have none, and neither have rows that fail before they are served."""
    assert Counts(num_answered=10).seconds_left(30, EngineStats(num_running=8), 5.0) == 15.0
    stats = EngineStats(num_running=8, num_decode_tokens=80)
    assert Counts(failures_by_code={"a": 10}).seconds_left(30, stats, 5.0) is None


def test_before_the_first_answer_a_line_says_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    shown = Progress("lines", out)
    shown.start(300, 0)
    shown.update(Counts(), lambda: replace(STATS, num_running=256), is_last=True)
    assert out.getvalue().startswith("0/300 rows (256 in flight have 9000 tokens), 0.00 rows/s")


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
