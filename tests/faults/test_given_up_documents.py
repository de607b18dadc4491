"""A document whose pages end workers is given up, unless one of them is rendered in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli import main as cli
from npu_runner.serving.workers.given_up import DocumentFailures
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


@pytest.mark.full("three timeouts")
def test_a_poisoned_document_costs_three_timeouts(tmp_path: Path) -> None:
    (tmp_path / "slow.pdf").write_bytes(slow_pages(12))
    (tmp_path / "good.pdf").write_bytes(pdf(*[text("good")] * 12))
    parts: Any = [[{"type": "image_url", "image_url": {"url": f"{name}.pdf#page={page}", "longest": 300}}]
                  for page in range(1, 13) for name in ("good", "slow")]
    write_rows(tmp_path / "in.jsonl", [row(f"{number:02}", messages=[{"role": "user", "content": part}], max_tokens=2)
                                       for number, part in enumerate(parts)])
    arguments = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *SMALL,
                 "--allowed-media-dir", str(tmp_path), "--preprocessing-timeout", "6", "--preprocessing-workers", "1"]
    assert cli.main(arguments) == 3
    found = {line["custom_id"]: line["error"] and line["error"]["code"] for line in read_rows(tmp_path / "out.jsonl")}
    given = [found[f"{number:02}"] for number in range(24)]
    assert given[0::2] == [None] * 12
    assert sorted(filter(None, given)) == ["document_given_up"] * 9 + ["preprocessing_timeout"] * 3
    (tmp_path / "slow.pdf").write_bytes(pdf(*[text("mended")] * 12))
    assert subprocess.run([sys.executable, "-m", "npu_runner", *arguments, "--retry", "errors"]).returncode == 0
