"""The command with the embedded model: any number of replicas, killed or not, gives the bytes of one undisturbed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.batch.scripted import row, write_rows
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

NUM_IMAGES = 16
NUM_KILLS = 40


def requests(folder: Path) -> list[dict[str, Any] | bytes]:
    """Images and text, greedy and drawn, several completions, and rows that fail. No log probabilities: their last
    digits depend on who else is in the batch, as sums of floats do."""
    made: list[dict[str, Any] | bytes] = [b"not json"]
    for number in range(NUM_IMAGES):
        example = draw_example(TEST_SEEDS[300 + number])
        parts: list[dict[str, Any]] = [{"type": "text", "text": example.question}]
        for index, image in enumerate(example.images):
            image.save(folder / f"{number}-{index}.png")
            parts.append({"type": "image_url", "image_url": {"url": f"{number}-{index}.png"}})
        made.append(row(f"image {number}", messages=[{"role": "user", "content": parts}], max_tokens=48))
        made.append(row(f"text {number}", "Hello!", temperature=number % 3, n=1 + number % 2, max_tokens=48,
                        ignore_eos=True))  # fmt: skip
    missing = [{"type": "image_url", "image_url": {"url": "no.png"}}]
    return [*made, row("missing", messages=[{"role": "user", "content": missing}]), row("seeded", "Who?", seed=7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows, and `one.jsonl`: the answers of one replica that nobody disturbed."""
    made = tmp_path_factory.mktemp("replicas")
    write_rows(made / "in.jsonl", requests(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        status, said = ended(start_real(made, "one.jsonl"))
    assert status == 3, said
    return made


@pytest.fixture(autouse=True)
def _time_and_threads(fixed_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def lines(path: Path) -> list[bytes]:
    return sorted(path.read_bytes().splitlines())


def answers_of_two_ranks(folder: Path) -> list[bytes]:
    """Of one replica that nobody disturbed; `tensor_parallel_size` is a setting that answers name."""
    output = folder / "one-of-two-ranks.jsonl"
    if not output.exists():
        status, said = ended(start_real(folder, output.name, "--tensor-parallel-size", "2"))
        assert status == 3, said
    return lines(output)


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


def killed_until_done(folder: Path, rng: random.Random, num_kills: dict[str, int],
                      run: Callable[[Path, int], int]) -> None:
    """Jobs, one after the other, each run again until it ends by itself: its rows are there once then.

    `run`: one run for this output, of so many ranks; returns its exit status.
    """
    num_jobs = 0
    while sum(num_kills.values()) < NUM_KILLS:
        output = folder / f"killed-{num_jobs}.jsonl"
        num_ranks = rng.choice([1, 1, 2])
        expected = lines(folder / "one.jsonl") if num_ranks == 1 else answers_of_two_ranks(folder)
        while True:
            status = run(output, num_ranks)
            found = lines(output) if output.exists() else []
            if status == 3:
                break
            whole = [line for line in found if line in set(expected)]
            assert len(set(whole)) == len(whole) >= len(found) - 1, "at most the last line is torn"
        assert found == expected
        output.unlink()
        num_jobs += 1
    print(f"{num_kills} over {num_jobs} jobs")


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
