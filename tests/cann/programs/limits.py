"""Graphs until the device has no more: which code, and that what was captured still works."""

from __future__ import annotations

import os

import torch

from .emulation import error_of
from .graphs import captured


def capture_until_refused() -> tuple[list[torch.npu.NPUGraph], torch.Tensor, str]:
    counter, graphs = torch.zeros(4).npu(), []

    def forever() -> None:
        for _ in range(200):
            graphs.append(captured(lambda: counter.add_(1)))

    return graphs, counter, error_of(forever)


def check_the_number_of_graphs_is_limited() -> None:
    graphs, counter, message = capture_until_refused()
    code = 207005 if "CANN_EMU_MAX_GRAPHS" in os.environ else 207008
    assert f"error {code}" in message, message
    for graph in graphs:
        graph.replay()
    assert counter.cpu().tolist() == [float(len(graphs))] * 4
    graphs.clear()
    captured(lambda: counter.add_(1))  # what they held is free again
