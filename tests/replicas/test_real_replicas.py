"""The command with the embedded model: any number of replicas, killed or not, gives the bytes of one undisturbed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.replicas.jobs import (
    RANK,
    REPLICA,
    ended,
    family,
    kill,
    kill_at_random,
    leftovers,
    num_rows,
    processes,
    singly,
    start_real,
    wait_for_rows,
    wait_until,
    wait_until_gone,
)
from tests.replicas.real_jobs import NUM_IMAGES, answers_of_two_ranks, killed_until_done, lines

pytestmark = pytest.mark.usefixtures("fixed_time", "one_thread_each")


@pytest.mark.full("five replicas load a model; two of LLM stay (test_llm_replicas.py), and jobs with a script")
def test_three_replicas_and_then_two_of_which_one_is_killed_answer_as_one(folder: Path) -> None:
    output = folder / "three.jsonl"
    segments = set(os.listdir("/dev/shm"))
    job = start_real(folder, output.name, "--data-parallel-size", "3")
    wait_for_rows(job, output, 5)
    whole = family(job.pid)
    job.send_signal(signal.SIGTERM)
    status, said = ended(job)
    assert status == 1, said
    wait_until_gone(whole)
    assert 5 <= num_rows(output) < 2 * NUM_IMAGES
    job = start_real(folder, output.name, "--data-parallel-size", "2")
    before = num_rows(output)
    wait_for_rows(job, output, before + 1)
    kill(processes(REPLICA, job.pid)[:1])
    status, said = ended(job)
    assert status == 3, said
    assert "died: killed by SIGKILL" in said
    assert lines(output) == lines(folder / "one.jsonl")
    assert set(os.listdir("/dev/shm")) <= segments
    assert not {name for name in leftovers(folder) if name.endswith((".new", ".lock", ".suspects.json"))}


@pytest.mark.slow
@pytest.mark.full("two replicas of two ranks on two cores; the death of an engine's rank stays, from a script")
def test_a_rank_that_is_killed_ends_its_replica_alone(folder: Path) -> None:
    output = folder / "ranks.jsonl"
    job = start_real(folder, output.name, "--data-parallel-size", "2", "--tensor-parallel-size", "2")
    wait_for_rows(job, output, 2)
    whole = family(job.pid)
    ranks = processes(RANK, job.pid)
    assert len(ranks) == 4
    kill(ranks[:1])
    wait_until(lambda: set(processes(RANK, job.pid)) - set(whole), job)
    status, said = ended(job)
    assert status == 3, said
    assert "died (killed by SIGKILL)" in said
    assert "started again (1 of 3)" in said
    assert lines(output) == answers_of_two_ranks(folder)
    wait_until_gone(whole)


@pytest.mark.slow
@pytest.mark.full("forty kills of drivers, replicas and ranks; chosen moments stay")
@pytest.mark.timeout(3000)
def test_killed_at_forty_moments_every_row_is_there_once(folder: Path) -> None:
    rng = random.Random(4)
    num_kills = {"driver": 0, "replica": 0, "rank": 0}
    killed_until_done(folder, rng, num_kills, lambda output, num_ranks: run_and_kill(
        folder, output, rng, num_ranks, num_kills))


def run_and_kill(folder: Path, output: Path, rng: random.Random, num_ranks: int, num_kills: dict[str, int]) -> int:
    """One run of the command with up to three deaths in it; returns its exit status."""
    count = 2 if num_ranks == 2 else rng.randint(2, 3)
    job = start_real(folder, output.name, "--data-parallel-size", str(count), "--tensor-parallel-size",
                     str(num_ranks), "--max-replica-restarts", "5")  # fmt: skip
    seen: set[int] = set()

    def victims() -> dict[str, list[list[int]]]:
        seen.update(family(job.pid))
        return {"driver": [[job.pid]], "replica": singly(processes(REPLICA, job.pid)),
                "rank": singly(processes(RANK, job.pid))}  # fmt: skip

    kill_at_random(job, output, rng, victims, num_kills)
    status, said = ended(job)
    wait_until_gone(sorted(seen))
    assert status in (3, -signal.SIGKILL), said
    return status
