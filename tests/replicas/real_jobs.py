"""Rows for the embedded model over replicas, and jobs that are killed until they are done."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.batch.scripted import row
from tests.replicas.jobs import (
    ended,
    start_real,
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


def lines(path: Path) -> list[bytes]:
    return sorted(path.read_bytes().splitlines())


def answers_of_two_ranks(folder: Path) -> list[bytes]:
    """Of one replica that nobody disturbed; `tensor_parallel_size` is a setting that answers name."""
    output = folder / "one-of-two-ranks.jsonl"
    if not output.exists():
        status, said = ended(start_real(folder, output.name, "--tensor-parallel-size", "2"))
        assert status == 3, said
    return lines(output)


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
