"""Lazy mode: nothing runs before somebody waits, so a host that overwrites a buffer too early is caught."""

from __future__ import annotations

import torch


def check_a_pinned_buffer_overwritten_too_early_shows() -> None:
    pinned = torch.ones(4).pin_memory()
    device = pinned.to("npu", non_blocking=True)
    pinned.fill_(7)
    assert device.cpu().tolist() == [7.0] * 4, "the copy ran before anybody waited"


def check_waiting_before_overwriting_is_safe() -> None:
    pinned = torch.ones(4).pin_memory()
    device = pinned.to("npu", non_blocking=True)
    torch.npu.synchronize()
    pinned.fill_(7)
    assert device.cpu().tolist() == [1.0] * 4


def check_results_are_the_same_in_the_end() -> None:
    a = torch.arange(6.0).npu()
    assert (a * 2 + 1).sum().item() == 36.0
    event = torch.npu.Event()
    event.record()
    while not event.query():
        pass
