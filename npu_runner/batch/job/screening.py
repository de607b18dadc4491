"""Rows prepared without a model: a job that tries failed rows again looks first whether preprocessing refuses them all.

Loads no weights. Knows nothing of the output.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.row_server import RowServer, ServerPlan
from npu_runner.serving.endpoint import Prepared
from npu_runner.serving.replica import FinishedRow

_IDLE_SECONDS = 0.2
_MAX_BYTES_IN_MEMORY = 64 << 20


class RefusedRows:
    """The error rows of rows that preprocessing has refused: 64 MiB in memory, more in a nameless file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_MAX_BYTES_IN_MEMORY)  # noqa: SIM115 - closed by `close`
        self._num_rows = 0

    def close(self) -> None:
        self._file.close()

    def add_all(self, plan: ServerPlan, book: RowBook, check: Callable[[dict[str, Any]], None]) -> bool:
        """Have rows prepared until one is fit for the model. Returns whether none is.

        `check` is called with the settings that are known without weights. Raises what it raises, and what a replica
        raises while it opens the checkpoint and prepares rows; JobError when the disk is full.
        """
        server = RowServer(plan)
        with server:
            server.start(lambda: None, lambda event: None)
            check(server.known_settings())
            for prepared in prepared_rows(server, book):
                if prepared.error is None:
                    return False
                with late_file_errors(f"error rows in {tempfile.gettempdir()}", was_tried=False):
                    pickle.dump(server.endpoint.finish(prepared, prepared.error), self._file)
                self._num_rows += 1
        return True

    def __iter__(self) -> Iterator[FinishedRow]:
        """In the order in which they were prepared."""
        self._file.seek(0)
        for _ in range(self._num_rows):
            yield pickle.load(self._file)


def prepared_rows(server: RowServer, book: RowBook) -> Iterator[Prepared]:
    """All rows of `book`, prepared by a server that was started, in the order in which its workers are done."""
    num_submitted = num_prepared = 0
    while num_prepared < book.num_rows:
        last = min(book.num_rows, num_prepared + server.num_rows_ahead)
        if last > num_submitted:
            server.submit(book.run(range(num_submitted, last)))
            num_submitted = last
        prepared = server.endpoint.next(_IDLE_SECONDS)
        if prepared is not None:
            num_prepared += 1
            yield prepared
