"""kill -9 of the job at thirty moments, random ones and chosen ones: every row is there once, byte for byte."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.batch.scripted import row, workers_of, write_rows
from tests.faults.killed_jobs import started, wait_for_rows, whole_lines

NUM_KILLS = 30
NUM_KILLS_WITH_ROWS = 4
NUM_IMAGES = 12
SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off",
         "--preprocessing-workers", "1", "--allowed-media-dir", "."]  # fmt: skip


def requests(folder: Path) -> Iterator[dict[str, Any] | bytes]:
    """Images and text, greedy and drawn with a seed and without, several completions, and rows that fail.

    No logprobs: their last digits depend on who else is in the batch, as sums of floats do.
    """
    for number in range(NUM_IMAGES):
        example = draw_example(TEST_SEEDS[200 + number])
        parts: list[dict[str, Any]] = [{"type": "text", "text": example.question}]
        for index, image in enumerate(example.images):
            image.save(folder / f"{number}-{index}.png")
            parts.append({"type": "image_url", "image_url": {"url": f"{number}-{index}.png"}})
        yield row(f"image {number}", messages=[{"role": "user", "content": parts}], max_tokens=48)
        yield row(f"text {number}", "Hello!", temperature=number % 3, n=1 + number % 2, max_tokens=24)
    yield b"not json"
    yield row(
        "missing", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no.png"}}]}]
    )
    yield row("seeded", "Who are you?", temperature=1.5, seed=7, max_tokens=24)


def wait_until_workers_are_gone(job: int) -> None:
    """The test's own timeout ends this if one stays."""
    while workers_of(job):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.full("thirty jobs, killed and resumed; the other tests of the file kill at chosen moments")
def test_killed_at_thirty_moments_every_row_is_there_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_rows(tmp_path / "in.jsonl", requests(tmp_path))
    undisturbed = tmp_path / "undisturbed.jsonl"
    command = ["batch", "-i", "in.jsonl", *SMALL, "-o"]
    assert started([*command, undisturbed.name, "--ordered"], tmp_path).wait() == 3
    expected = whole_lines(undisturbed)
    assert len(expected) == 2 * NUM_IMAGES + 3

    rng, num_kills, num_jobs = random.Random(2), 0, 0
    num_kills_with_rows = {False: 0, True: 0}  # by whether the job is ordered: then with rows that are early
    began = time.monotonic()
    assert started([*command, "measured.jsonl"], tmp_path).wait() == 3
    whole_seconds = time.monotonic() - began
    while num_kills < NUM_KILLS or min(num_kills_with_rows.values()) < NUM_KILLS_WITH_ROWS:
        # When a job was finished before it could be killed, the next one begins; every other one is ordered.
        output = tmp_path / f"out-{num_jobs}.jsonl"
        is_ordered = num_jobs % 2 == 1
        arguments = [*command, output.name, *(["--ordered"] if is_ordered else [])]
        job = started(arguments, tmp_path)
        if num_kills % 2:
            wait_for_rows(job.pid, output, len(whole_lines(output)) + rng.randint(1, 8))
        else:
            time.sleep(rng.uniform(0, whole_seconds))
        job.kill()
        status = job.wait()
        wait_until_workers_are_gone(job.pid)
        if status == -signal.SIGKILL:
            num_kills += 1
            found = whole_lines(output)
            assert set(found) <= set(expected)
            assert len(set(found)) == len(found)
            if found and not (is_ordered and found == expected[: len(found)]):
                num_kills_with_rows[is_ordered] += 1
        else:
            assert_finished(status, output, expected, is_ordered)
            num_jobs += 1
    assert_finished(started(arguments, tmp_path).wait(), output, expected, is_ordered)
    print(f"{num_kills} kills over {num_jobs + 1} jobs of {whole_seconds:.1f} s; with rows: {num_kills_with_rows}")


def assert_finished(status: int, output: Path, expected: list[bytes], is_ordered: bool) -> None:
    assert status == 3
    found = whole_lines(output)
    assert output.read_bytes() == b"".join(found)
    assert (found if is_ordered else sorted(found)) == (expected if is_ordered else sorted(expected))
    names = {path.name for path in output.parent.iterdir() if output.name in path.name}
    assert names == {f"{output.name}{end}" for end in ("", ".manifest.json", ".rows", ".status.json")}
