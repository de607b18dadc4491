"""Error codes of CANN and HCCL that users meet, and what to do about each. docs/running-on-ascend.md has the table."""

from __future__ import annotations

import re

ERROR_CODES = {
    "207001": ("device memory ran out", "lower --memory-utilization, --max-num-batched-tokens or --image-max-pixels; "
               "npu-smi info shows who else holds memory"),
    "207005": ("the device has no resources left for a graph or a stream", "give fewer --graph-batch-sizes; end other "
               "jobs on the device"),
    "207008": ("the device's streams are used up", "give fewer --graph-batch-sizes; end other jobs on the device"),
    "107002": ("no device was chosen in this thread", "a fault of the program: report it"),
    "107030": ("an operation that a capture does not allow, usually a memory allocation", "lower "
               "--memory-utilization by 0.05, or run with --enforce-eager"),
    "161001": ("an operator got a null argument", "torch_npu and CANN do not fit each other: see the version table"),
    "161002": ("an operator refuses an argument", "the message names it; compare versions with the table, report it"),
    "507035": ("a kernel failed, mostly by reading outside its memory", "run once with ASCEND_LAUNCH_BLOCKING=1 and "
               "--enforce-eager: the message then names the operator"),
    "507046": ("a stream did not finish in time", "look for a rank that died or a device that hangs (npu-smi info)"),
    "507048": ("a collective was not finished in time", "look for the first rank that failed; HCCL_EXEC_TIMEOUT "
               "is how long the others wait"),
    "561002": ("an operator cannot split these shapes among the cores (tiling)", "the message names it; run with "
               "--enforce-eager to see whether the graph is to blame, then report it"),
    "EI0006": ("HCCL's ranks did not find each other in time", "raise HCCL_CONNECT_TIMEOUT; check that every rank "
               "started and that HCCL_SOCKET_IFNAME names an interface that works"),
    "EJ0003": ("HCCL's port is taken", "export HCCL_IF_BASE_PORT to the first of 16 free ports; look for an older job"),
    "EI0019": ("HCCL's port is taken", "export HCCL_IF_BASE_PORT to the first of 16 free ports; look for an older job"),
}
"""Code to (what it means, remedy)."""


def explain(output: str) -> str:
    """What the first known code in `output` means and what to do, or an empty text."""
    found = re.search(rf"\b({'|'.join(ERROR_CODES)})\b", output)
    if found is None:
        return ""
    meaning, remedy = ERROR_CODES[found[1]]
    return f"{found[1]}: {meaning}; {remedy}"
