"""Rows that preprocessing refuses need no model: a job that tries failed rows again looks for them before it loads one.

Loads no weights. Knows nothing of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.delivery import EarlyRows
from npu_runner.batch.job.row_server import RowServer, ServerPlan

_IDLE_SECONDS = 0.2


def all_are_refused(
    plan: ServerPlan, book: RowBook, refused: EarlyRows, check: Callable[[dict[str, Any]], None]
) -> bool:
    """Have rows prepared until one is fit for the model. True: none is, and `refused` has the error row of each.

    `check` is called with the settings that are known without weights. Raises what it raises, and what a replica raises
    while it opens the checkpoint and prepares rows.
    """
    num_submitted = num_refused = 0
    server = RowServer(plan)
    with server:
        server.start(lambda: None, lambda event: None)
        check(server.known_settings())
        while num_refused < book.num_rows:
            last = min(book.num_rows, num_refused + server.num_rows_ahead)
            if last > num_submitted:
                server.submit(book.run(range(num_submitted, last)))
                num_submitted = last
            prepared = server.endpoint.next(_IDLE_SECONDS)
            if prepared is None:
                continue
            if prepared.failure is None:
                return False
            refused.add(prepared.failure)
            num_refused += 1
    return True
