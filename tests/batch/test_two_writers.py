"""Two processes that write one file: the second is refused or waits, and what is in the place is always whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npu_runner.batch.files.durable import remove_torn_version, replacing
from npu_runner.batch.files.status_file import LiveFile
from npu_runner.errors import JobError

OLD, FIRST, SECOND = b"the old one, whole\n", b"first, line 1\nfirst, line 2\n", b"second, line 1\nsecond, line 2\n"


def test_the_second_writer_is_refused_and_the_first_one_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "t.csv"
    place.write_bytes(OLD)
    with replacing(place) as first:
        first.write(FIRST)
        with pytest.raises(JobError, match=r"t\.csv: another process is writing it.* choose another name"), \
                replacing(place):
            pass
        remove_torn_version(place)  # what the next command does, which cannot know of the first
        assert place.read_bytes() == OLD
    assert place.read_bytes() == FIRST
    with replacing(place) as second:
        second.write(SECOND)
    assert place.read_bytes() == SECOND
    assert os.listdir(tmp_path) == ["t.csv"]


def test_a_new_version_that_was_removed_meanwhile_is_no_new_version(tmp_path: Path) -> None:
    """By somebody who takes no lock: an earlier release, a person."""
    place, new = tmp_path / "t.csv", tmp_path / ".t.csv.new"
    place.write_bytes(OLD)
    writing = replacing(place)
    writing.__enter__()
    new.unlink()
    new.write_bytes(b"half of another on")
    with pytest.raises(JobError, match="another process is writing it"):
        writing.__exit__(None, None, None)
    assert place.read_bytes() == OLD
    assert new.read_bytes() == b"half of another on", "it is somebody else's"


def test_figures_that_another_job_is_writing_are_said_once_and_end_no_job(tmp_path: Path) -> None:
    said: list[str] = []
    figures = LiveFile("metrics_file m", tmp_path / "m", said.append)
    with replacing(tmp_path / "m") as other:
        other.write(FIRST)
        figures.write(SECOND)
        figures.write(SECOND)
    assert (tmp_path / "m").read_bytes() == FIRST
    assert len(said) == 1
    assert "another process is writing it" in said[0]
    figures.write(SECOND)
    assert (tmp_path / "m").read_bytes() == SECOND


WRITER = """
import sys
from pathlib import Path
from npu_runner.batch.files.durable import replacing
from npu_runner.errors import JobError
place, word, waits = Path(sys.argv[1]), sys.argv[2].encode() * 1000, sys.argv[3] == "waits"
print("ready", flush=True)
while True:
    try:
        with replacing(place, is_synced=False, waits=waits) as file:
            file.write(word[:3000]); file.flush(); file.write(word[3000:])
    except JobError:
        assert not waits
"""


@pytest.mark.full("two processes write for some seconds and are killed at random")
@pytest.mark.parametrize("waits", ["waits", "is refused"])
def test_writers_that_are_killed_leave_whole_files(tmp_path: Path, waits: str) -> None:
    place = tmp_path / "t"
    whole = {b"abcdefg" * 1000, b"1234567" * 1000}
    draw = random.Random(5)
    for _ in range(4):
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, place, word, waits], stdout=subprocess.PIPE)
                   for word in ("abcdefg", "1234567")]  # fmt: skip
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        for writer in draw.sample(writers, 2):
            until = time.monotonic() + draw.uniform(0.1, 0.4)
            while time.monotonic() < until:
                assert not place.exists() or place.read_bytes() in whole
            assert writer.poll() is None, "it goes on beside the other, and after it was killed"
            writer.kill()
            writer.communicate()
        assert place.read_bytes() in whole
    with replacing(place) as file:
        file.write(OLD)
    assert place.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["t"]
