"""Graphs that an earlier run left behind."""

from __future__ import annotations

from typing import Any

import torch

from npu_runner.platforms.graphs import DecodeForward, GraphResourceError
from tests.oracle.running import UncompiledGraphs


class KeptGraphs(UncompiledGraphs):
    """Graphs that an earlier run left behind: each is compared with eager. Those below `least` cannot be had."""

    def __init__(self, least: int = 0):
        self.least = least
        self.discarded: list[int] = []

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        def refuse(*_: Any) -> torch.Tensor:
            raise GraphResourceError(f"none below {self.least}")

        return forward if batch_size >= self.least else refuse

    def was_loaded(self, batch_size: int) -> bool:
        return True

    def discard(self, batch_size: int) -> None:
        self.discarded.append(batch_size)
