"""What one decode step costs an Ascend device, counted on the emulated CANN, for the three graph modes.

A tiny model in bfloat16 decodes a full batch. The cost of a layer is the difference between checkpoints of two and of
four layers of its kind (--kind, default: all kinds); what is left of the forward, and the sampler (greedy, and a draw
from the whole vocabulary), come beside it. Then a layer of a vision tower of Qwen3-VL's shape. Counts and bytes are
what a device gets to do.

The host's time is that of this machine's Python and torch_npu while nothing runs (the emulation computes when somebody
waits): good to compare modes and versions of this code on one machine, and no figure of an Ascend host.

Starts the emulated CANN by itself, and builds it when it is not there. Prints tables, then one JSON line for each kind.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.common import make_parser, print_result
from tests.cann.environment import has_real_cann, run_python
from tests.cann.setup_site import PACKAGES
from tests.npu.layer_kinds import KINDS, LAYERS
from tests.oracle.tiny_checkpoints import make_checkpoint

MODES = ("eager", "reduce-overhead", "max-autotune")
# GE operators that launch nothing: views, and transposes of weights, which the matmul absorbs.
VIEWS = {"Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose"}
COUNTED = {"launches a layer": "per_layer", "launches of the forward beside": "forward",
           "launches of the sampler, greedy": "greedy", "launches of the sampler, plain draw": "draw"}

Calls = dict[str, float]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--kind", choices=(*KINDS, "tower"), action="append",
                        help="of layer; may be repeated; default: all")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be repeated; default: all three")
    arguments = parser.parse_args()
    if has_real_cann():
        parser.error("this host has a real CANN, which counts nothing; run it where libascendcl.so is not to be found")
    kinds = arguments.kind or [*KINDS, "tower"]
    for name in [name for name in kinds if name != "tower"]:
        costs = measure_kind(name, arguments.mode or MODES, arguments.batch_size)
        print_kind(name, costs)
        print_result("npu_ops", arguments, kind=name, emulated=emulated_versions(),
                     modes={mode: summary(cost) for mode, cost in costs.items()})
    if "tower" in kinds:
        per_layer = measure_tower()
        print_result("npu_ops", arguments, kind="tower", emulated=emulated_versions(),
                     launches_per_layer=sum(per_layer.values()), per_layer=per_layer)


def measure_kind(name: str, modes: Any, batch_size: int) -> dict[str, dict[str, Any]]:
    """Counts by mode, and the host's times, which are measured in a process of their own."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder), kind)
        given = models, batch_size, Path(folder), kind.settings
        return {mode: measure(mode, *given, kind.emulation) | measure(mode, *given, {**kind.emulation, "lazy": "1"})
                for mode in modes}


def print_kind(name: str, costs: dict[str, dict[str, Any]]) -> None:
    print(f"== {name}")
    for title, key in COUNTED.items():
        print_calls(title, {mode: launched(cost[key]) for mode, cost in costs.items()})
    print_row("outside the layers, with a draw", [f"{outside(cost):g}" for cost in costs.values()])
    print()
    print_calls("host's calls a layer", {mode: cost["host_per_layer"] for mode, cost in costs.items()})
    for title, key in (("copies", "copies"), ("synchronisations", "syncs")):
        print_traffic(title, {mode: cost[key] for mode, cost in costs.items()})
    print_row(f"host, ms a step of {next(iter(costs.values()))['num_layers']} layers", list(costs))
    for title, key, phase in (
            ("prepare and send", "host_milliseconds", "prepare"), ("launch, or replay", "host_milliseconds", "launch"),
            ("sampler", "host_milliseconds", "sample"), ("launch, of each layer", "host_milliseconds_per_layer",
                                                         "launch")):
        print_row(f"  {title}", [f"{cost[key][phase]:.3f}" for cost in costs.values()])
    print()


def measure_tower() -> Calls:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        done = run_python(
            ["-m", "tests.npu.programs.tower_cost", str(results)], allow_fp32_attention=True)
        if done.returncode != 0:
            raise SystemExit(f"tower: {done.stderr[-4000:]}")
        cost = json.loads(results.read_text())
    print("== vision tower")
    print_calls("launches a layer", {"eager": cost["per_layer"]})
    print_calls("launches beside, deepstack with", {"eager": cost["rest"]})
    return dict(cost["per_layer"])


def make_models(folder: Path, kind: Any) -> dict[int, str]:
    """Checkpoints that differ in nothing but their number of layers of that kind."""
    return {count: str(make_checkpoint(folder / f"layers-{count}", kind.model_type, **kind.config(count)))
            for count in LAYERS}


def measure(mode: str, models: dict[int, str], batch_size: int, folder: Path, more: dict[str, str],
            emulation: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"graph_mode": mode, "dtype": "bfloat16", "vision_cache_bytes": 0, **more}
    if mode != "eager":
        settings |= {"graph_batch_sizes": [batch_size]}
    if mode == "max-autotune":
        settings |= {"use_graph_cache": False}
    spec, results = folder / "spec.json", folder / "results.json"
    spec.write_text(json.dumps({"models": models, "batch_size": batch_size, "settings": settings}))
    done = run_python(
        ["-m", "tests.npu.programs.decode_cost", str(spec), str(results)], **emulation)
    if done.returncode != 0:
        raise SystemExit(f"{mode}: {done.stderr[-4000:]}")
    return dict(json.loads(results.read_text()))


def outside(cost: dict[str, Any]) -> float:
    """Launches of a step that belong to no layer, the sampler's draw with them."""
    return sum(launched(cost["forward"]).values()) + sum(cost["draw"].values())


def launched(calls: Calls) -> Calls:
    return {name: count for name, count in calls.items() if name not in VIEWS}


def print_calls(title: str, columns: dict[str, Calls]) -> None:
    """Operators by mode; the graph engine has names of its own, so many rows have one entry."""
    names = sorted({name for calls in columns.values() for name in calls},
                   key=lambda name: (-max(calls.get(name, 0) for calls in columns.values()), name))
    print_row(title, list(columns))
    for name in names:
        print_row(f"  {name}", [f"{calls[name]:g}" if name in calls else "" for calls in columns.values()])
    print_row("  all", [f"{sum(calls.values()):g}" for calls in columns.values()])
    print()


def print_traffic(title: str, columns: dict[str, dict[str, dict[str, int]]]) -> None:
    names = sorted({name for entries in columns.values() for name in entries})
    print_row(f"{title} of a step", list(columns))
    for name in names:
        cells = []
        for entries in columns.values():
            entry = entries.get(name, {})
            size = f" ({entry['bytes']} bytes)" if entry.get("bytes") else ""
            cells.append(f"{entry['calls']}{size}" if entry else "")
        print_row(f"  {name}", cells)
    print()


def print_row(name: str, cells: list[str]) -> None:
    print(f"{name:<40}" + "".join(f"{cell:>20}" for cell in cells))


def summary(cost: dict[str, Any]) -> dict[str, Any]:
    return {"launches_per_layer": sum(launched(cost["per_layer"]).values()), "launches_outside": outside(cost),
            **{key: launched(cost[key]) for key in COUNTED.values()},
            **{key: cost[key] for key in ("host_per_layer", "fallbacks", "copies", "syncs", "cache_bytes",
                                          "host_milliseconds", "host_milliseconds_per_layer")}}


def emulated_versions() -> dict[str, str]:
    wheel = next(name for name in PACKAGES if name.startswith("torch_npu"))
    return {"torch_npu": wheel.partition("==")[2], "cann": "emulated"}


if __name__ == "__main__":
    main()
