"""Has a worker process make the pictures of cards, each different one once. Knows nothing of where they are put.

What kills the worker, or keeps it too long, is a picture that cannot be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from npu_runner.batch.report.reading import Medium
from npu_runner.batch.report.thumbnails import Picture, ThumbnailMaker
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool

_MAX_PENDING = 64  # on their way to the worker and back


def key_of(medium: Medium) -> str:
    """Stands for a medium whose URL may hold megabytes."""
    kind = "video" if medium.is_video else "image"
    return hashlib.blake2b(f"{kind} {medium.url}".encode("utf-8", "replace"), digest_size=12).hexdigest()


@dataclass(frozen=True)
class _OfMedium:
    thumbnails: ThumbnailMaker

    def __call__(self, task: tuple[str, Medium]) -> Picture | None:
        _, medium = task
        return self.thumbnails.sheet(medium.url) if medium.is_video else self.thumbnails(medium.url)


class PictureMaker:
    """Entered while pages are made. The worker process starts with the first medium."""

    def __init__(self, thumbnails: ThumbnailMaker, worker: PoolLimits):
        self._make = _OfMedium(thumbnails)
        self._worker = worker
        self._pool: WorkerPool[tuple[str, Medium]] | None = None
        self._entered = ExitStack()

    def __enter__(self) -> PictureMaker:
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def make(self, media: Iterator[Medium], known: Container[str] = ()) -> dict[str, Picture]:
        """By `key_of`, but those that are `known`; what cannot be shown is left out."""
        found: dict[str, Picture] = {}
        tasks, num_pending = self._different(media, known), 0
        while True:
            while num_pending < _MAX_PENDING and (task := next(tasks, None)) is not None:
                self._open_pool().submit(task)
                num_pending += 1
            if not num_pending:  # all are looked at by now
                return found
            finished = self._open_pool().get(1.0)
            if finished is not None:
                num_pending -= 1
                if isinstance(finished.result, Picture):
                    found[finished.task[0]] = finished.result

    @staticmethod
    def _different(media: Iterator[Medium], known: Container[str]) -> Iterator[tuple[str, Medium]]:
        seen: set[str] = set()
        for medium in media:
            key = key_of(medium)
            if key not in seen and key not in known:
                seen.add(key)
                yield key, medium

    def _open_pool(self) -> WorkerPool[tuple[str, Medium]]:
        if self._pool is None:
            self._pool = self._entered.enter_context(WorkerPool(self._make, self._worker))
        return self._pool
