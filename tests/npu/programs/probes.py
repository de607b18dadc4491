"""Probes of a start on CANN 8.5, with one operator of the platform computed otherwise, as another kernel might.

    python -m tests.npu.programs.probes MODEL BARE W8A8

writes {name: what the start says, or the second choices it takes} as JSON on the last line. MODEL is started with
replays that keep old lengths, and with a cache write that computes otherwise. BARE, a checkpoint without weights, is
started with keys that are rotated backwards. W8A8, a checkpoint of int8 with dynamic inputs, is started as it should be
and with a matmul that computes otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
# Of a job that two kernels can do, the first: the table, the kernel, and what is made of it.
FIRST_KERNELS: dict[str, tuple[str, str, Change]] = {
    "values before keys, first choice": ("CACHE_WRITES", "npu_scatter_pa_kv_cache",
                                         lambda good: lambda k, v, *rest: good(v, k, *rest)),
    "images see each other, first choice": (
        "VISION_ATTENTIONS", "npu_fused_infer_attention_score",
        lambda good: lambda q, k, v, totals, scale: good(q, k, v, totals[-1:], scale)),
}


def for_weights(kind: str, change: Callable[[Any], Any]) -> Change:
    """A linear that computes otherwise with weights of this type alone."""
    return lambda good: lambda self, x, weight, bias: good(
        self, x, change(weight) if type(weight).__name__ == kind else weight, bias)


def _fail(*given: object) -> None:
    raise RuntimeError("error code is 207000")


# Changes that one form of weights notices.
MATMULS: dict[str, tuple[str, str, Change]] = {
    "nothing of int8": ("NpuQuantisedOps", "linear", lambda good: good),
    "rows by their squares": ("NpuQuantisedOps", "linear", for_weights(
        "Int8Weight", lambda weight: weight._replace(scales_O=weight.scales_O * weight.scales_O))),
    "a norm by another scale": ("NpuQuantisedOps", "add_rms_norm", lambda good: lambda self, x, r, w, eps, by: good(
        self, x, r, 2 * w if isinstance(by, str) else w, eps, by)),
    "the bias twice": ("NpuQuantisedOps", "linear", for_weights(
        "StaticInt8Weight", lambda weight: weight._replace(shifts_O=2 * weight.shifts_O))),
    "an offset that is lost": ("NpuQuantisedOps", "add_rms_norm", lambda good: lambda self, x, r, w, eps, by: good(
        self, x, r, w, eps, by if isinstance(by, str) else by._replace(offsets_D=torch.zeros_like(by.offsets_D)))),
    "no such operator": ("NpuQuantisedOps", "linear", for_weights("Int8Weight", _fail)),
}
REPLAYS: dict[str, tuple[str, str, Change]] = {
    "nothing, captured": ("AclGraphCompiler", "before_replay", lambda good: good),
    "old lengths": ("AclGraphCompiler", "before_replay", lambda good: lambda self, size, lens: good(
        self, size, [6, 201])),
    "a replay that fails": ("_AclGraph", "__call__", lambda good: _fail),
}


def _lacks_nnal(*given: object) -> None:
    raise OSError("Please check that the nnal package is installed.")  # torch_npu's words, and its type


@contextmanager
def changed(owner: str, method: str, change: Change) -> Iterator[None]:
    from npu_runner.platforms.npu import graphs
    from npu_runner.platforms.npu.attention import NpuAttention
    from npu_runner.platforms.npu.ops import NpuOps
    from npu_runner.platforms.npu.quantised_ops import NpuQuantisedOps

    homes: dict[str, Any] = {home.__name__: home for home in (
        NpuOps, NpuQuantisedOps, NpuAttention, graphs.AclGraphCompiler, graphs._AclGraph)}
    good = getattr(homes[owner], method)
    setattr(homes[owner], method, change(good))
    try:
        yield
    finally:
        setattr(homes[owner], method, good)


@contextmanager
def changed_kernel(table: str, name: str, change: Change) -> Iterator[None]:
    from npu_runner.platforms.npu import kernels

    functions = getattr(kernels, table)
    good = functions[name]
    functions[name] = change(good)
    try:
        yield
    finally:
        functions[name] = good


def needs(num_heads: int, num_kv_heads: int, tower: tuple[int, int] | None = None) -> Any:
    from npu_runner.platforms.platform import ModelNeeds

    return ModelNeeds(num_heads=num_heads, num_kv_heads=num_kv_heads, tower=tower, dtype="bfloat16", head_dim=128,
                      block_size=128, has_experts=False, has_states=False, has_windows=False)


def prove(asked: Any) -> str:
    from npu_runner.errors import ConfigError
    from npu_runner.platforms.npu.kernels import FIRST_CHOICES
    from npu_runner.platforms.npu.probes import prove_operators

    try:
        taken = prove_operators(asked, "8.5.0", masks_decode=True)
    except ConfigError as refusal:
        return str(refusal)
    usual = vars(FIRST_CHOICES)
    return ", ".join(name for job, name in vars(taken).items() if name != usual[job])


def prove_matmuls(asked: Any) -> dict[str, str]:
    from npu_runner.platforms.npu.probes import why_unproven

    return why_unproven(("int8", "int8_static"))


def prove_replay(asked: Any) -> str:
    from npu_runner.platforms.npu.attention import NpuAttention
    from npu_runner.platforms.npu.graphs import AclGraphCompiler
    from npu_runner.platforms.npu.kernels import FIRST_CHOICES
    from npu_runner.platforms.npu.probes import Side, why_no_replay

    npu = Side.from_npu(asked, masks_decode=True, kernels=FIRST_CHOICES)
    assert isinstance(npu.attention, NpuAttention)
    return why_no_replay(AclGraphCompiler(npu.attention), npu, Side.from_cpu(asked), asked) or ""


def start(model: str, graph_mode: str = "reduce-overhead", **settings: Any) -> dict[str, Any] | str:
    """What a whole start says of itself, and its tokens, or its refusal."""
    from npu_runner import LLM, SamplingParams
    from npu_runner.errors import ConfigError

    graphs: dict[str, Any] = {} if graph_mode == "eager" else {"graph_batch_sizes": [2]}
    try:
        with LLM(model, platform="npu", dtype="bfloat16", graph_mode=graph_mode, max_model_len=512, max_num_seqs=2,
                 max_num_batched_tokens=512, vision_cache_bytes=0, **graphs, **settings) as llm:
            outputs = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            return {**llm.engine.describe(), "graphs": llm.engine.info.graphs, "tokens": outputs[0].token_ids}
    except ConfigError as refusal:
        return str(refusal)


def main(model: str, bare: str, w8a8: str) -> None:
    torch.npu.set_device(0)
    said: dict[str, Any] = {}
    with torch.inference_mode():
        for changes, run in ((OPERATORS, prove), (MATMULS, prove_matmuls), (REPLAYS, prove_replay)):
            for name, change in changes.items():
                with changed(*change):
                    said[name] = run(needs(4, 2, tower=(2, 72)))
        for name, kernel in FIRST_KERNELS.items():
            with changed_kernel(*kernel):
                said[name] = prove(needs(4, 2, tower=(2, 72)))
        with (changed_kernel(*FIRST_KERNELS["values before keys, first choice"]),
              changed_kernel("CACHE_WRITES", "_npu_reshape_and_cache", lambda good: _lacks_nnal)):
            said["no NNAL"] = prove(needs(4, 2))
        said["equal heads"], said["too many heads"] = prove(needs(2, 2)), prove(needs(72, 8))
    with changed(*REPLAYS["old lengths"]):
        said["started with old lengths"] = start(model)
    with changed_kernel(*FIRST_KERNELS["values before keys, first choice"]):
        said["started with a second choice"] = start(model, "eager")
    with changed(*OPERATORS["rotated backwards"]):
        said["started backwards"] = start(bare)
    said["started with int8"] = start(w8a8, "eager")
    with changed(*MATMULS["rows by their squares"]):
        said["started without int8"] = start(w8a8, "eager")
        said["asked for int8"] = start(bare, "eager", quantization="int8")
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
