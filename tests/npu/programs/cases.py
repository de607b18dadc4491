"""Cases of a model's start, with one operator of the platform computed otherwise, as another kernel might.

    python -m tests.npu.programs.cases

writes {name: what a start would do} as JSON on the last line: the second choices it takes, or what it says.
"""

from __future__ import annotations

import dataclasses
import json
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
    "a scale of its own": ("NpuAttention", "prefill", lambda good: lambda self, q, k, v, metadata, scale, **rest: good(
        self, q, k, v, metadata, 2 * scale, **rest)),
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
    "old lengths": ("AclGraphCompiler", "before_replay", lambda good: lambda self, size, lens, *rest: good(
        self, size, [6, 201], *rest)),
    "a replay that fails": ("_AclGraph", "__call__", lambda good: _fail),
}
# Changes that steps with drafts notice.
DRAFTED: dict[str, tuple[str, str, Change]] = {
    "nothing, drafted": ("NpuAttention", "_of_sequences", lambda good: good),
    "another row's blocks": ("NpuAttention", "_of_sequences", lambda good: lambda self, *given: (
        good(self, *given)[0].flip(0), good(self, *given)[1])),
    "an old split": ("AclGraphCompiler", "before_replay", lambda good: lambda self, size, lens, sequences=None: good(
        self, size, lens, sequences if sequences is None else _FIRST_SPLITS.setdefault(size, sequences))),
    "replays with drafts that fail": ("_AclGraph", "__call__", lambda good: _fail),
}
_FIRST_SPLITS: dict[int, Any] = {}


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


def asked(num_heads: int = 4, num_kv_heads: int = 2, **changes: Any) -> dict[str, Any]:
    from npu_runner.platforms.platform import ModelNeeds

    needs = ModelNeeds(dtype="bfloat16", graph_mode="reduce-overhead", hidden_size=128, head_dim=128,
                       num_heads=num_heads, num_kv_heads=num_kv_heads, mlp_width=256, tower=(2, 72),
                       forms=("int8", "int8_static", "grouped"))
    return dataclasses.asdict(dataclasses.replace(needs, **changes))


def chosen(words: str, **changes: Any) -> dict[str, Any] | str:
    """What a start would do after the cases whose titles have one of these words, or its refusal."""
    from npu_runner.errors import ConfigError
    from npu_runner.platforms import find_platform, reference_platform
    from npu_runner.platforms.cases import Side, choose, run_case
    from npu_runner.platforms.npu.cases import of_model

    findings = []
    for case in of_model(asked(**changes)):
        if any(word in case.title for word in words.split("|")):
            npu, cpu = Side(find_platform("npu"), torch.bfloat16), Side(reference_platform(), torch.float64)
            findings.append(run_case(case, npu, cpu, {}))
    assert findings, words
    try:
        kernels, reasons = choose(findings)
    except ConfigError as refusal:
        return str(refusal)
    return {"kernels": kernels, "reasons": reasons}


# The cases that notice each change.
WORDS = {"NpuOps": "rotary|tower", "NpuAttention": "cache|tower", "NpuQuantisedOps": "quant|rounds",
         "AclGraphCompiler": "captured", "_AclGraph": "captured"}


def main() -> None:
    from npu_runner.platforms import find_platform

    assert find_platform("npu").why_unavailable() is None
    said: dict[str, Any] = {}
    with torch.inference_mode():
        for name, change in {**OPERATORS, **MATMULS, **REPLAYS}.items():
            with changed(*change):
                said[name] = chosen(WORDS[change[0]])
        for name, change in DRAFTED.items():
            with changed(*change):
                said[name] = chosen("drafts", num_drafts=3)
        for name, kernel in FIRST_KERNELS.items():
            with changed_kernel(*kernel):
                said[name] = chosen("cache write|tower")
        with (changed_kernel(*FIRST_KERNELS["values before keys, first choice"]),
              changed_kernel("CACHE_WRITES", "_npu_reshape_and_cache", lambda good: _lacks_nnal)):
            said["no NNAL"] = chosen("cache write")
        with changed("NpuAttention", "_attend_in_window", lambda good: lambda self, *given: good(
                self, *given[:4], given[4] if self._gathers_windows else 2 * given[4], given[5])):
            said["a window of another scale"] = chosen("window", windows=(100,))
        said["equal heads"] = chosen("paged cache", num_heads=2)
        said["too many heads"] = chosen("rotary", num_heads=72, num_kv_heads=8)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
