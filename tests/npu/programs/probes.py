"""Probes of a start on CANN 8.5, with one operator of the platform computed otherwise, as another kernel might.

    python -m tests.npu.programs.probes          writes {name: what the start says, or ""} as JSON on the last line
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
# Class and method, and the method made of the good one.
OPERATORS: dict[str, tuple[str, str, Change]] = {
    "nothing": ("NpuOps", "rotary", lambda good: good),
    "rotated backwards": ("NpuOps", "rotary", lambda good: lambda self, q, k, cos, sin: good(self, q, k, cos, -sin)),
    "values before keys": ("NpuAttention", "write_kv", lambda good: lambda self, k, v, *rest: good(self, v, k, *rest)),
    "a slot further": ("NpuAttention", "write_kv", lambda good: lambda self, k, v, keys, values, slots: good(
        self, k, v, keys, values, slots - 1)),
    "the last token not seen": ("NpuAttention", "plan_decode", lambda good: lambda self, lens, *rest: good(
        self, [length - 1 for length in lens], *rest)),
    "a scale of its own": ("NpuAttention", "prefill", lambda good: lambda self, q, k, v, metadata, scale: good(
        self, q, k, v, metadata, 2 * scale)),
    "images see each other": ("NpuAttention", "plan_vision", lambda good: lambda self, lengths, device: good(
        self, [sum(lengths)], device)),
    "the other gelu": ("NpuOps", "gelu", lambda good: lambda self, x, approximate: torch.relu(x)),
    "NaN": ("NpuOps", "rotary_in_float32", lambda good: lambda self, *given: tuple(
        x * float("nan") for x in good(self, *given))),
}
REPLAYS: dict[str, tuple[str, str, Change]] = {
    "nothing, captured": ("AclGraphCompiler", "before_replay", lambda good: good),
    "old lengths": ("AclGraphCompiler", "before_replay", lambda good: lambda self, size, lens, tables: good(
        self, size, [6, 201], tables)),
    "a replay that fails": ("_AclGraph", "__call__", lambda good: _fail),
}


def _fail(*given: object) -> None:
    raise RuntimeError("error code is 207000")


def main() -> None:
    from npu_runner.errors import ConfigError
    from npu_runner.platforms.npu import graphs
    from npu_runner.platforms.npu.attention import NpuAttention
    from npu_runner.platforms.npu.ops import NpuOps
    from npu_runner.platforms.npu.probes import Side, prove_operators
    from npu_runner.platforms.npu.replay_probe import why_no_replay
    from npu_runner.platforms.platform import ModelNeeds

    def prove_replay(needs: ModelNeeds) -> str:
        npu = Side.of_npu(needs, masks_decode=True)
        assert isinstance(npu.attention, NpuAttention)
        return why_no_replay(graphs.AclGraphCompiler(npu.attention), npu, Side.of_cpu(needs), needs) or ""

    def prove(needs: ModelNeeds) -> str:
        try:
            prove_operators(needs, "8.5.0", masks_decode=True)
        except ConfigError as refusal:
            return str(refusal)
        return ""

    torch.npu.set_device(0)
    common: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 128, "block_size": 128, "has_experts": False,
                              "has_states": False, "has_windows": False}
    needs = ModelNeeds(num_heads=4, num_kv_heads=2, tower=(2, 72), **common)
    homes: dict[str, Any] = {home.__name__: home for home in (NpuOps, NpuAttention, graphs.AclGraphCompiler,
                                                              graphs._AclGraph)}
    said = {}
    with torch.inference_mode():
        for changes, run in ((OPERATORS, prove), (REPLAYS, prove_replay)):
            for name, (owner, method, change) in changes.items():
                good = getattr(homes[owner], method)
                setattr(homes[owner], method, change(good))
                said[name] = run(needs)
                setattr(homes[owner], method, good)
        said["equal heads"] = prove(ModelNeeds(num_heads=2, num_kv_heads=2, tower=None, **common))
        said["too many heads"] = prove(ModelNeeds(num_heads=72, num_kv_heads=8, tower=None, **common))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
