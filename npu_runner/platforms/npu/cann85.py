"""What is served on CANN 8.5, and what is refused there by name before weights are read. Imports no torch.

By the sources of its release, all operators of dense Qwen3 and Qwen3-VL are in CANN 8.5; docs/ascend.md lists them with
their sources. Nobody ran a wheel of TorchNPU 26.2.0 on it, so a start there also computes probes (probes.py). Knows
no operator.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    found = list(_out_of_scope(needs))
    if found:
        raise ConfigError(f"{', '.join(found)} on CANN {cann}: {SCOPE}; {REMEDY}")


def _out_of_scope(needs: ModelNeeds) -> Iterator[str]:
    if needs.has_states:
        yield "Gated DeltaNet layers"
    if needs.has_experts:
        yield "layers of experts"
    if needs.has_windows:
        yield "sliding windows"
    if needs.dtype != DTYPE:
        yield f"dtype {needs.dtype}"
    if needs.head_dim != HEAD_DIM:
        yield f"head dim {needs.head_dim}"
