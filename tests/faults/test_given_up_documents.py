"""A document whose pages end workers is given up, unless one of them is rendered in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.serving.given_up import DocumentFailures
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool
from tests.batch.scripted import read_rows, row, write_rows
from tests.faults.slow_pages import slow_pages
from tests.faults.worker_tasks import die_at_odd
from tests.prompts.pdf_files import pdf, text

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]


def codes(tasks: list[tuple[str, int]]) -> list[str | None]:
    """The code of each task, one after another in one worker that dies at odd pages."""
    failures: DocumentFailures[tuple[str, int]] = DocumentFailures(lambda task: [task] if task[0] else [])
    found: dict[tuple[str, int], str | None] = {}

    def seen(task: Any, result: Any) -> None:
        failures.record(task, result if isinstance(result, WorkerFailure) else None)

    limits = PoolLimits(num_workers=1, task_timeout_seconds=120.0)
    with WorkerPool(die_at_odd, limits, seen=seen, refusal=failures.refusal) as pool:
        for task in tasks:
            pool.submit(task)
        while len(found) < len(tasks):
            if (item := pool.get(1.0)) is not None:
                found[item.task] = getattr(item.result, "code", None)
    return [found[task] for task in tasks]


def test_three_pages_that_end_workers_give_a_document_up() -> None:
    crashed = "preprocessing_crashed"
    tasks = [("a", 1), ("a", 3), ("b", 1), ("b", 3), ("b", 4), ("b", 5), ("", 1), ("a", 5), ("a", 6), ("a", 7),
             ("b", 6)]
    assert codes(tasks) == [crashed, crashed, crashed, crashed, None, crashed, crashed, crashed, "document_given_up",
                            "document_given_up", None]


def test_one_page_that_fails_again_and_again_gives_nothing_up() -> None:
    failures: DocumentFailures[int] = DocumentFailures(lambda task: [("a", 1)])
    for _ in range(5):
        failures.record(0, WorkerFailure("", "preprocessing_timeout"))
    assert failures.refusal(0) is None
    for code in ("internal_error", "document_given_up"):
        other: DocumentFailures[int] = DocumentFailures(lambda task: [("a", task)])
        for page in range(5):
            other.record(page, WorkerFailure("", code))
        assert other.refusal(0) is None


def test_replicas_count_together() -> None:
    def pages(task: tuple[str, int]) -> list[tuple[str, int]]:
        return [task]

    def tell(speaker: DocumentFailures[Any], listener: DocumentFailures[Any]) -> int:
        news = speaker.news()
        for outcome in news:
            listener.hear(outcome)
        return len(news)

    ended = WorkerFailure("", "preprocessing_crashed")
    one: DocumentFailures[tuple[str, int]] = DocumentFailures(pages)
    other: DocumentFailures[tuple[str, int]] = DocumentFailures(pages)
    one.record(("a", 1), ended)
    other.record(("a", 2), ended)
    assert (tell(one, other), tell(other, one)) == (1, 1), "what was heard is no news"
    other.record(("a", 3), None)
    assert tell(other, one) == 1
    one.record(("a", 4), None)
    assert tell(one, other) == 0, "of a document without failures"
    for page, replica in ((5, one), (6, other), (7, one)):
        assert replica.refusal(("a", 9)) is None
        replica.record(("a", page), ended)
        tell(one, other)
        tell(other, one)
    for replica in (one, other):
        assert "its pages 5, 6, 7 ended" in str(replica.refusal(("a", 9)))
        assert replica.refusal(("b", 9)) is None


@pytest.mark.full("timeouts of three pages or four")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_poisoned_document_costs_three_timeouts(num_replicas: int, tmp_path: Path) -> None:
    """A second replica may be at work on a fourth page."""
    (tmp_path / "slow.pdf").write_bytes(slow_pages(12))
    (tmp_path / "good.pdf").write_bytes(pdf(*[text("good")] * 12))
    parts: Any = [[{"type": "image_url", "image_url": {"url": f"{name}.pdf#page={page}", "longest": 300}}]
                  for page in range(1, 13) for name in ("good", "slow")]
    write_rows(tmp_path / "in.jsonl", [row(f"{number:02}", messages=[{"role": "user", "content": part}], max_tokens=2)
                                       for number, part in enumerate(parts)])
    arguments = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *SMALL,
                 "--allowed-media-dir", str(tmp_path), "--preprocessing-timeout", "6", "--preprocessing-workers", "1",
                 "--data-parallel-size", str(num_replicas)]
    assert subprocess.run([sys.executable, "-m", "npu_runner", *arguments], check=False).returncode == 3
    found = {line["custom_id"]: line["error"] and line["error"]["code"] for line in read_rows(tmp_path / "out.jsonl")}
    given = [found[f"{number:02}"] for number in range(24)]
    assert given[0::2] == [None] * 12
    num_timeouts = given.count("preprocessing_timeout")
    assert 3 <= num_timeouts < 3 + num_replicas
    assert given.count("document_given_up") == 12 - num_timeouts
    (tmp_path / "slow.pdf").write_bytes(pdf(*[text("mended")] * 12))
    assert subprocess.run([sys.executable, "-m", "npu_runner", *arguments, "--retry", "errors"]).returncode == 0
