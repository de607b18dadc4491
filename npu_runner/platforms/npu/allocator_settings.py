"""The variables that torch_npu's allocator of device memory reads, and what may stand in them. Imports no torch.

Wheels of TorchNPU 26.2.0 for torch 2.10 and later also read torch's own name. Where both are set, empty or not, they do
not start. Older wheels read the vendor's name alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_runner.errors import ConfigError
from npu_runner.platforms.npu.versions import reads_torchs_alloc_conf

VENDORS, TORCHS = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
# Segments that grow lose less memory to pictures of ever different sizes.
WANTED = "expandable_segments:True"
_PINNED = "pin_memory_expandable_segments"
NO_CAPTURE = f"{_PINNED}:True: torch_npu captures no graph with it"
ONE_OF_TWO = f"unset {TORCHS}, and keep {VENDORS}={WANTED}"

Environment = Mapping[str, str]


def allocator_defaults(environment: Environment) -> dict[str, str]:
    """Read when the allocator starts. Where the user has set either name, ours would be the second."""
    return {} if VENDORS in environment or TORCHS in environment else {VENDORS: WANTED}


def check_allocator(environment: Environment, torch_npu: str) -> None:
    """Raises ConfigError for two names where the wheel reads both: now, and not by ERR01003 where the device starts."""
    if refuses_both(environment, torch_npu):
        raise ConfigError(f"{VENDORS} and {TORCHS} are both set: torch_npu {torch_npu} reads both, and takes one; "
                          f"{ONE_OF_TWO}")


def check_pinned_memory(environment: Environment) -> None:
    """Raises ConfigError for pinned memory that no capture goes with."""
    for name in (VENDORS, TORCHS):
        if has_growing_pinned_memory(environment.get(name, "")):
            raise ConfigError(f"{name}: {NO_CAPTURE} (graph_mode reduce-overhead); take it out, or set enforce_eager")


def refuses_both(environment: Environment, torch_npu: str | None) -> bool:
    """torch_npu: None where it is not installed; a wheel that comes will be a new one."""
    return VENDORS in environment and TORCHS in environment and (
        torch_npu is None or reads_torchs_alloc_conf(torch_npu))


def entries(value: str) -> dict[str, str]:
    """The settings in a variable's value."""
    return dict(entry.partition(":")[::2] for entry in value.replace(" ", "").split(",") if entry)


def has_growing_pinned_memory(value: str) -> bool:
    return entries(value).get(_PINNED, "").lower() == "true"
