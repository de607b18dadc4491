"""Rows prepared without a model: a job that tries failed rows again looks first whether preprocessing refuses them all.

Loads no weights. Knows nothing of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.delivery import EarlyRows
from npu_runner.batch.job.row_server import RowServer, ServerPlan
from npu_runner.serving.endpoint import Prepared

_IDLE_SECONDS = 0.2


def all_are_refused(plan: ServerPlan, book: RowBook, refused: EarlyRows,
                    check: Callable[[dict[str, Any]], None]) -> bool:
    """Have rows prepared until one is fit for the model. True: none is, and `refused` has the error row of each.

    `check` is called with the settings that are known without weights. Raises what it raises, and what a replica raises
    while it opens the checkpoint and prepares rows.
    """
    server = RowServer(plan)
    with server:
        server.start(lambda: None, lambda event: None)
        check(server.known_settings())
        for prepared in prepared_rows(server, book):
            if prepared.error is None:
                return False
            refused.add(server.endpoint.finish(prepared, prepared.error))
    return True


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
