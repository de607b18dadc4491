"""Refuses by name, before weights are read, the models and settings that CANN 8.5 does not serve. Imports no torch.

By the sources of its release, all operators of dense Qwen3 and Qwen3-VL are in CANN 8.5; docs/ascend.md lists them with
their sources. No host has run a wheel of TorchNPU 26.2.0 on it. Knows no operator.
"""

from __future__ import annotations

from npu_runner.errors import ConfigError
from npu_runner.platforms.platform import ModelNeeds

HEAD_DIM, DTYPE = 128, "bfloat16"
SCOPE = (f"served are dense models in {DTYPE} with head dim {HEAD_DIM}, eager or in captured graphs "
         "(reduce-overhead)")
UNVERIFIED = "not verified on any 8.5: no host with it has run npu-runner"
REMEDY = "install CANN 9.0 or newer, or set platform to cpu"


def check_graph_mode(graph_mode: str, cann: str) -> None:
    """Raises ConfigError for graphs of the graph engine."""
    if graph_mode == "max-autotune":
        raise ConfigError(f"graph_mode max-autotune on CANN {cann}: its graph engine was never tried with this; set "
                          "graph_mode to reduce-overhead or eager")


def check_scope(needs: ModelNeeds, cann: str) -> None:
    """Raises ConfigError for a model that is not served, with everything of it that is not."""
    refused = {"Gated DeltaNet layers": needs.states is not None, "layers of experts": needs.experts is not None,
               "sliding windows": bool(needs.windows), f"dtype {needs.dtype}": needs.dtype != DTYPE,
               f"head dim {needs.head_dim}": needs.head_dim != HEAD_DIM}
    if any(refused.values()):
        raise ConfigError(f"{', '.join(name for name in refused if refused[name])} on CANN {cann}: {SCOPE}; {REMEDY}")
