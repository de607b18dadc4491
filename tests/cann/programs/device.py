"""Memory, copies, streams and events: what the runtime promises, and how it fails. The device has 256 MiB."""

from __future__ import annotations

import torch
import torch_npu

from .emulation import calls, counters, error_of, refused, reset_counters, set_failures

MIB = 1 << 20


def check_fresh_memory_is_poisoned() -> None:
    torch.npu.empty_cache()
    fresh = torch.empty(3 * MIB, device="npu").cpu()
    assert fresh.isnan().all(), "a kernel that reads what nobody wrote must show"


def check_memory_info_is_true() -> None:
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    assert total == 256 * MIB
    held = torch.empty(32 * MIB, dtype=torch.uint8, device="npu")
    assert free - torch.npu.mem_get_info()[0] >= 32 * MIB
    del held
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free


def check_memory_runs_out_and_comes_back() -> None:
    message = error_of(lambda: torch.empty(300 * MIB, dtype=torch.uint8, device="npu"))
    assert "out of memory" in message, message
    assert "256.00 MiB" in message, message
    assert torch.ones(4 * MIB, device="npu").sum().item() == 4 * MIB


def check_the_nth_allocation_fails_when_asked() -> None:
    torch.npu.empty_cache()
    set_failures("aclrtMalloc:2:207001,aclrtMallocPhysical:2:207001")
    first = torch.empty(40 * MIB, dtype=torch.uint8, device="npu")
    try:
        torch.empty(60 * MIB, dtype=torch.uint8, device="npu")
    except torch.OutOfMemoryError:
        pass
    else:
        # The allocator frees its cache and tries once more, so that one failure alone need not surface.
        assert first.numel() == 40 * MIB
    finally:
        set_failures("")


def check_a_named_function_fails_with_the_code_asked_for() -> None:
    set_failures("aclnnMm:2:561002")
    a = torch.ones(2, 2).npu()
    assert torch.mm(a, a).sum().item() == 8
    with refused(561002, "aclnnMm"):
        torch.mm(a, a)
    assert torch.mm(a, a).sum().item() == 8
    set_failures("")


def check_copies_are_counted_by_direction_and_bytes() -> None:
    host = torch.ones(256)
    reset_counters()
    device = host.npu()
    twin = device.clone()
    twin.cpu()
    copies = counters()["copies"]
    assert copies["h2d"] == {"calls": 1, "bytes": 1024}, copies
    assert copies["d2h"] == {"calls": 1, "bytes": 1024}, copies
    assert (
        copies["d2d"]["bytes"] + copies.get("d2d_operator", {"bytes": 0})["bytes"] == 1024
        if "d2d" in copies
        else copies["d2d_operator"]["bytes"] == 1024
    )


def check_launches_and_synchronisations_are_counted() -> None:
    a = torch.ones(4).npu()
    reset_counters()
    b = a + a
    b = b * 2
    assert calls("launches") == {"aclnnAdd": 1, "aclnnMuls": 1}, calls("launches")
    reset_counters()
    torch.npu.current_stream().synchronize()
    assert counters()["syncs"]["stream"]["calls"] == 1, counters()


def check_pinned_copies_do_not_block() -> None:
    pinned = torch.ones(64).pin_memory()
    reset_counters()
    pinned.to("npu", non_blocking=True)
    assert "syncs" not in counters(), counters()


def check_streams_are_ordered_by_events() -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    a = torch.zeros(4).npu()
    with torch.npu.stream(side):
        a.add_(1)
        event.record()
    event.wait()
    assert (a + 1).cpu().tolist() == [2.0] * 4
    event.synchronize()
    assert event.query()


def check_elapsed_time_needs_recorded_events() -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    torch.ones(8).npu()
    end.record()
    torch.npu.synchronize()
    assert start.elapsed_time(end) >= 0


def check_two_devices_hold_their_own_memory() -> None:
    assert torch.npu.device_count() == 2
    a = torch.ones(4, device="npu:0")
    with torch.npu.device(1):
        free, _ = torch.npu.mem_get_info()
        b = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:1")
        assert torch.npu.mem_get_info()[0] <= free - 64 * MIB
    assert a.to("npu:1").cpu().tolist() == [1.0] * 4
    del b


def check_soc_and_version() -> None:
    assert torch_npu.npu.get_device_name(0).startswith("Ascend910B"), torch_npu.npu.get_device_name(0)
