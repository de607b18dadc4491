"""Programs that the doctor runs on a host to learn what is there. Each function runs alone, in a process of its own.

So each one imports what it needs, and appends its findings to a file as it goes: what came before a crash is known.
"""

from __future__ import annotations


def libraries(reports: str) -> None:
    """Which libraries of the vendor load: their name, and the loader's message or None."""
    import ctypes
    import json

    for name in ("libascendcl.so", "libhccl.so", "libatb.so"):
        reason = None
        try:
            ctypes.CDLL(name)
        except OSError as error:
            reason = str(error)
        with open(reports, "a") as file:
            file.write(json.dumps([name, reason]) + "\n")


def devices(reports: str) -> None:
    """The devices that torch_npu sees, one by one."""
    import json

    import torch
    import torch_npu

    def report(value: object) -> None:
        with open(reports, "a") as file:
            file.write(json.dumps(value) + "\n")

    report({"torch": torch.__version__, "torch_npu": torch_npu.__version__})
    report({"count": torch.npu.device_count()})
    for index in range(torch.npu.device_count()):
        torch.npu.set_device(index)
        free_bytes, total_bytes = torch.npu.mem_get_info(index)
        report({"name": torch.npu.get_device_name(index), "free_bytes": free_bytes, "total_bytes": total_bytes})
