"""Choices between two ways of the npu platform that no device has measured yet. Knows nothing of models.

Environment variables, read once in each process: docs/ascend.md says what each is for, `scripts/regress_ascend.sh`
measures both sides. The first choice is the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from npu_runner.errors import ConfigError
from npu_runner.platforms.facts import AttentionFacts, StateFacts

# Every document of the attention kernel allows blocks of 128 for prefill and decode, and no other size. Without a cache
# the kernel takes these head dims; a tower's 72 is padded to the next of them. op-plugin's document of it limits the
# context of one query, and the elements of paged keys to int32. By its source, the decode kernel wraps at uint32.
ATTENTION_FACTS = AttentionFacts(block_sizes=(128,), vision_head_dims=(64, 128, 256), longest_context=262_144,
                                 most_elements=2**31 - 1)
# The fused operator takes eight tokens of a sequence.
STATE_FACTS = StateFacts(most_drafts=7, drafts_in_graphs=True)
PREFIX = "NPU_RUNNER_ASCEND_"
CHOICES = {
    "decode_attention": ("masked", "unmasked"),
    "capture": ("compiled", "recorded"),
    "ge_tiling": ("auto", "device", "host"),
    "replay": ("waiting", "overlapped"),
    "nz_weights": ("int8", "all", "none"),
    "cases": ("on", "off"),
}


@dataclass(frozen=True, kw_only=True)
class NpuSettings:
    decode_attention: str = "masked"
    """The mask of decode's attention call: prefill's mask, or none, as the decode kernels' documents ask."""
    capture: str = "compiled"
    """Who makes the graphs of reduce-overhead: torch_npu's compiler, or torch.npu.graph around the eager step."""
    ge_tiling: str = "auto"
    """Where GE lays out operators by their inputs' values: on the device, on the host, or as this CANN can."""
    replay: str = "waiting"
    """Whether a captured graph is given its new context lengths once its last replay has run, or at once."""
    nz_weights: str = "int8"
    """The quantised weights in NZ: those of int8 matmuls, also those with inputs in 16 bits, or none."""
    cases: str = "on"
    """Whether a start compares operators with the CPU. Off: what computes otherwise here is used all the same."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> NpuSettings:
        """From NPU_RUNNER_ASCEND_<NAME>. Raises ConfigError for unknown names and values."""
        given = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items()
                 if name.startswith(PREFIX)}
        for name, value in given.items():
            variable = PREFIX + name.upper()
            if name not in CHOICES:
                known = ", ".join(PREFIX + choice.upper() for choice in CHOICES)
                raise ConfigError(f"{variable} is no setting; known are {known}")
            if value not in CHOICES[name]:
                raise ConfigError(f"{variable}={value} is not one of {', '.join(CHOICES[name])}")
        return cls(**given)


@cache
def npu_settings() -> NpuSettings:
    """The settings of this process."""
    return NpuSettings.read(os.environ)
