"""Gives a document up whose pages end worker processes or their time, so that its other pages cost no timeout each.

It lives beside the workers, because one that ended remembers nothing. Knows no files and no requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from npu_runner.serving.replica import PageOutcome
from npu_runner.serving.workers.pool import WorkerFailure

Task = TypeVar("Task")

MOST_PAGES = 3
_ENDINGS = ("preprocessing_crashed", "preprocessing_timeout", "preprocessing_out_of_memory")


class DocumentFailures(Generic[Task]):
    """`pages_of` gives the pages that a task shows, as (document, page). It is called for failed tasks, and for all
    tasks while a document has failures. `record` and `refusal` are the pool's thread's. `news` and `hear` join the
    counts of several replicas."""

    def __init__(self, pages_of: Callable[[Task], Iterable[tuple[str, int]]]):
        self._pages_of = pages_of
        self._lock = threading.Lock()
        self._failed: dict[str, set[int]] = {}
        """Pages that ended a worker since the document's last page was rendered."""
        self._given_up: dict[str, list[int]] = {}
        self._news: deque[PageOutcome] = deque()

    def record(self, task: Task, failure: WorkerFailure | None) -> None:
        """`failure`: None, the task's pages were rendered."""
        if not self._failed if failure is None else failure.code not in _ENDINGS:
            return
        for document, page in self._pages_of(task):
            if failure is not None or document in self._failed:
                outcome = PageOutcome(document, None if failure is None else page)
                self.hear(outcome)
                self._news.append(outcome)

    def hear(self, outcome: PageOutcome) -> None:
        """Count it, also one of another replica."""
        with self._lock:
            if outcome.ended is None:
                self._failed.pop(outcome.document, None)
                return
            pages = self._failed.setdefault(outcome.document, set())
            pages.add(outcome.ended)
            if len(pages) >= MOST_PAGES:
                self._given_up.setdefault(outcome.document, sorted(pages))

    def news(self) -> list[PageOutcome]:
        """The recorded outcomes since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def refusal(self, task: Task) -> WorkerFailure | None:
        """The failure of a task that shows a document which is given up; None: it may start."""
        for document, _ in self._pages_of(task) if self._given_up else ():
            if (pages := self._given_up.get(document)) is not None:
                return WorkerFailure(
                    f"the document {document[:200]!r} is given up: its pages {', '.join(map(str, pages))} ended their "
                    "worker process or its time, and none was rendered in between; --retry errors tries all again",
                    "document_given_up")
        return None
