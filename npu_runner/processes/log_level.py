"""Shows this package's log on standard error, where a variable asks for it. Knows nothing of what is logged.

Children inherit the variable: ranks, workers and replicas of this host show theirs, too.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "NPU_RUNNER_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to sys.stderr of the moment: notebooks and progress bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_log() -> None:
    """Show what is logged from the level of NPU_RUNNER_LOG_LEVEL on. Without the variable, logging stays as it is.

    Raises ValueError for a level that is none.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    if named.lower() not in LEVELS:
        raise ValueError(f"{VARIABLE}: {named!r} is not one of {', '.join(LEVELS)}")
    logger = logging.getLogger("npu_runner")
    logger.setLevel(named.upper())
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        handler = _Handler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(process)d %(name)s: %(message)s",
                                               datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False  # a handler of the program's own would say each line again
