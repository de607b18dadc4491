"""Starts jobs over replicas, and finds and ends what belongs to them. Holds no tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import zygote
from tests.batch.job_folder import LEFT

REPLICA, RANK = b"npu_runner.serving.replicas.process_main", b"npu_runner.engine.executors.worker"
_ANY = b"npu_runner."
ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def start_scripted(
    folder: Path, *, stage: str = "", stdout: int | None = None, platform: str = "cpu", **options: Any
) -> subprocess.Popen[bytes]:
    """A job over scripted engines, from in.jsonl to out.jsonl in `folder`, which is where it runs."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    fields = {
        "platform": platform, "model": str(model), "input": str(folder / "in.jsonl"),
        "output": str(folder / "out.jsonl"), "preprocessing_workers": 1, "progress": "off", "data_parallel_size": 2,
        **options,
    }  # fmt: skip
    return zygote.Popen(
        [sys.executable, "-m", "tests.replicas.scripted_job", json.dumps(fields)], stderr=subprocess.PIPE,
        stdout=stdout, env={**os.environ, "STAGE": stage, "PYTHONPATH": PYTHONPATH}, cwd=folder,
    )  # fmt: skip


def start_real(folder: Path, output: str, *options: str) -> subprocess.Popen[bytes]:
    """The command itself, with the embedded model."""
    command = [sys.executable, "-m", "npu_runner", "batch", "-i", "in.jsonl", "-o", output, "--platform", "cpu",
               "--max-model-len", "512", "--kv-cache-bytes", "32M", "--preprocessing-workers", "1",
               "--allowed-media-dir", ".", *options]  # fmt: skip
    return zygote.Popen(command, cwd=folder, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Its exit status and what it said."""
    _, errors = process.communicate()
    return process.returncode, errors.decode()


def processes(kind: bytes, ancestor: int) -> list[int]:
    """Those of this kind that descend from a job, the oldest first, without those that have ended."""
    parents: dict[int, int] = {}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(after_name[1])
            if after_name[0] != "Z" and kind in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(pid for pid in found if ancestor in _ancestors(pid, parents))


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found = set()
    while pid in parents:
        pid = parents[pid]
        found.add(pid)
    return found


def family(job: int) -> list[int]:
    """Everything that descends from a job."""
    return processes(_ANY, job)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """What the condition gives once it is true, or when the job ends. The test's timeout bounds it."""
    while not (found := condition()) and process.poll() is None:
        time.sleep(0.002)
    return found


def num_rows(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def wait_for_rows(process: subprocess.Popen[bytes], output: Path, count: int) -> None:
    wait_until(lambda: num_rows(output) >= count, process)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: list[int]) -> None:
    """Of the members of a job's family that were seen none is left, but for zombies of whoever adopted them."""
    while any(_runs(pid) for pid in pids):
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"model", "in.jsonl", *LEFT}


def singly(pids: list[int]) -> list[list[int]]:
    """Each may be killed by itself."""
    return [[pid] for pid in pids]


def kill_at_random(
    job: subprocess.Popen[bytes], output: Path, rng: random.Random,
    victims: Callable[[], dict[str, list[list[int]]]], num_kills: dict[str, int],
) -> None:  # fmt: skip
    """Up to three deaths in a job. `victims`: of each kind, groups of processes that die at once."""
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0.0, 8.0))
        else:
            wait_for_rows(job, output, num_rows(output) + rng.randint(1, 6))
        groups = victims()
        kinds = [kind for kind in ("replica", *groups) if groups[kind]]
        if kinds and job.poll() is None:
            kind = rng.choice(kinds)
            kill(rng.choice(groups[kind]))
            num_kills[kind] += 1
