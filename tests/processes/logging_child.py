"""A child that logs a line of each of two levels."""

from __future__ import annotations

import logging


def main(arguments: list[str]) -> None:
    logger = logging.getLogger("npu_runner.child")
    logger.info("an information")
    logger.warning("a warning")
