"""Error codes of CANN and HCCL that users meet, and what to do about each. docs/running-on-ascend.md has the table."""

from __future__ import annotations

import re

MANY_STREAMS_FROM = "25.5.1"  # with a driver (HDK) below it a device has few (vllm-ascend's release notes)
NEWER_DRIVER = f"update driver and firmware (HDK) to {MANY_STREAMS_FROM} or newer"

ERROR_CODES = {
    "sq cq": (f"a driver below {MANY_STREAMS_FROM} has no streams left for a graph", f"{NEWER_DRIVER}; until then "
              "give fewer --graph-batch-sizes"),
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
    "361001": ("CANN's runtime failed inside an operator", "look for the error before it in the log of the process "
               "(ASCEND_PROCESS_LOG_PATH, else ~/ascend/log)"),
    "507011": ("a graph failed on the device", "run with --enforce-eager and ASCEND_LAUNCH_BLOCKING=1: the message "
               "then names the operator that failed"),
    "507014": ("a kernel ran too long on the AI core", "run once with ASCEND_LAUNCH_BLOCKING=1 and --enforce-eager: "
               "the message then names the operator; npu-smi info -t health shows a device that hangs"),
    "507015": ("a kernel failed on the AI core", "run once with ASCEND_LAUNCH_BLOCKING=1 and --enforce-eager: the "
               "message then names the operator"),
    "507018": ("a kernel failed on the AI CPU", "run once with ASCEND_LAUNCH_BLOCKING=1 and --enforce-eager: the "
               "message then names the operator; report it"),
    "507035": ("a kernel failed, mostly by reading outside its memory", "run once with ASCEND_LAUNCH_BLOCKING=1 and "
               "--enforce-eager: the message then names the operator"),
    "507046": ("a stream did not finish in time", "look for a rank that died or a device that hangs (npu-smi info)"),
    "507048": ("a collective was not finished in time", "look for the first rank that failed; HCCL_EXEC_TIMEOUT "
               "is how long the others wait"),
    "561001": ("CANN failed to prepare an operator", "torch_npu and CANN may not fit each other: see the version "
               "table"),
    "561002": ("an operator cannot split these shapes among the cores (tiling)", "the message names it; run with "
               "--enforce-eager to see whether the graph is to blame, then report it"),
    "561003": ("CANN has no kernel for this chip: the image is for the other chip, or kernels are not installed",
               "take the image of this chip (A2 and A3 have images of their own), or install its kernels package"),
    "561107": ("CANN does not find its operators: ASCEND_OPP_PATH is not set", "source set_env.sh of the toolkit, or "
               "start with scripts/run_ascend.sh"),
    "561112": ("CANN has no package of kernels for this chip: the image is for the other chip, or none is installed",
               "take the image of this chip (A2 and A3 have images of their own), or install its kernels package"),
    "EI0006": ("HCCL's ranks did not find each other in time", "raise HCCL_CONNECT_TIMEOUT; check that every rank "
               "started and that HCCL_SOCKET_IFNAME names an interface that works"),
    "EJ0003": ("HCCL's port is taken", "export HCCL_IF_BASE_PORT to the first of 16 free ports; look for an older job"),
    "EI0019": ("HCCL's port is taken", "export HCCL_IF_BASE_PORT to the first of 16 free ports; look for an older job"),
}
"""Code, or words of a message that has none of its own, to (what it means, remedy)."""


PASSING = re.compile(r"out of memory|cannot allocate memory|\b(?:200000|207(?!000)\d{3}|507\d{3})\b", re.IGNORECASE)
"""Messages of failures that may not come again: memory or streams that another job holds, and a lost context."""
_CAUSES, _CONSEQUENCES = ("507", "561", "sq cq"), ("107030", "507046", "507048")
"""A kernel that fails or is missing ends a capture and leaves others waiting: its code says why, theirs do not."""


def explain(output: str) -> str:
    """The known codes in `output`, the likeliest cause first, with what to do about that one; or an empty text."""
    found = dict.fromkeys(re.findall(rf"\b({'|'.join(ERROR_CODES)})\b", output))
    if not found:
        return ""
    first, *others = sorted(found, key=lambda code: (code in _CONSEQUENCES, not code.startswith(_CAUSES)))
    meaning, remedy = ERROR_CODES[first]
    also = "".join(f"; also found: {code}, {ERROR_CODES[code][0]}" for code in others)
    return f"{first}: {meaning}; {remedy}{also}"
