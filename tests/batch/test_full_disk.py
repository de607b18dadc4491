"""A disk that is really full: a small tmpfs, where this user may mount one."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_runner.errors import JobError
from tests.batch.job_folder import LEFT, Job, numbered
from tests.batch.mounts import mounted
from tests.batch.scripted import OvertakingEngine, read_rows, row, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 100 kB."""
    folder = tmp_path_factory.mktemp("disk")
    with mounted(folder, "size=100k"):
        yield folder


@pytest.mark.parametrize("ordered", [True, *only_full("as they finish; in order stays", False)])
def test_a_full_disk_keeps_whole_rows_and_counts_just_them(job: Job, disk: Path, ordered: bool) -> None:
    write_rows(job.input, [row(text, "x" * (1 + int(text) % 7)) for text in numbered(300)])
    output, summary = disk / "out.jsonl", job.folder / "summary.json"
    with pytest.raises(JobError, match="No space left on device; make room and run the same command again"):
        job.run(output=str(output), summary=summary, ordered=ordered)
    rows = json.loads(summary.read_text())["rows"]
    assert 0 < rows["answered"] == len(read_rows(output)) == 300 - rows["unfinished"]
    subprocess.run(["mount", "-o", "remount,size=2M", disk], check=True)
    assert job.run(output=str(output), ordered=ordered).num_resumed == rows["answered"]
    names = [item["custom_id"] for item in read_rows(output)]
    assert (names if ordered else sorted(names)) == numbered(300)


def test_a_disk_too_full_for_the_order_keeps_every_answer(job: Job, disk: Path) -> None:
    write_rows(job.input, [row(text, text) for text in numbered(129)])
    output, summary = disk / "out.jsonl", job.folder / "summary.json"
    with pytest.raises(JobError, match="being put in order: No space left on device"):
        job.run(OvertakingEngine, output=str(output), summary=summary, ordered=True)
    told = json.loads(summary.read_text())
    assert (told["this_run"]["exit_status"], told["rows"]["answered"]) == (1, 129)
    assert {path.name for path in disk.iterdir()} == LEFT
    assert sorted(item["custom_id"] for item in read_rows(output)) == numbered(129)
    subprocess.run(["mount", "-o", "remount,size=2M", disk], check=True)
    job.run(output=str(output), ordered=True)
    assert [item["custom_id"] for item in read_rows(output)] == numbered(129)
    assert len(job.engines) == 1


def test_a_disk_without_room_for_a_lock_is_said_and_keeps_none(job: Job, disk: Path) -> None:
    write_rows(job.input, [row("a")])
    with open(disk / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(JobError, match=r"lock .*out\.jsonl\.lock: No space left on device; make room"):
        job.run(output=str(disk / "out.jsonl"))
    assert {path.name for path in disk.iterdir()} == {"fill"}
    (disk / "fill").unlink()
    assert job.run(output=str(disk / "out.jsonl")).exit_status == 0
