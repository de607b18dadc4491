"""What one decode step costs an Ascend device, counted on the emulated CANN, for the three graph modes.

A tiny model in bfloat16 decodes a full batch. The cost of a layer is the difference between checkpoints of two and of
four layers of its kind (--kind). Counts and bytes are what a device gets to do; times are not measured, and would mean
nothing here.

Starts the emulated CANN by itself, and builds it when it is not there. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_common import ROOT, commit

MODES = ("eager", "reduce-overhead", "max-autotune")
# GE operators that launch nothing: views, and transposes of weights, which go into the product.
VIEWS = {"Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose"}

Calls = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--kind", default="dense", choices=sorted(layer_kinds().KINDS), help="of layer")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be repeated; default: all three")
    arguments = parser.parse_args()
    if among_tests("cann.environment").has_real_cann():
        parser.error("this host has a real CANN, which counts nothing; run it where libascendcl.so is not to be found")
    modes = arguments.mode or MODES
    with tempfile.TemporaryDirectory() as name:
        models = make_models(Path(name), layer_kinds().KINDS[arguments.kind])
        emulation = layer_kinds().KINDS[arguments.kind].emulation
        costs = {mode: measure(mode, models, arguments.batch_size, Path(name), emulation) for mode in modes}
    for title, key in (("launches a layer", "per_layer"), ("launches of the rest of a step", "rest")):
        print_calls(title, {mode: launched(cost[key]) for mode, cost in costs.items()})
    print_calls("host's calls a layer", {mode: cost["host_per_layer"] for mode, cost in costs.items()})
    for title, key in (("copies", "copies"), ("synchronisations", "syncs")):
        print_traffic(title, {mode: cost[key] for mode, cost in costs.items()})
    print(json.dumps({"bench": "bench_npu_ops", "commit": commit(), "kind": arguments.kind,
                      "batch_size": arguments.batch_size,
                      "versions": versions(), "modes": {mode: summary(cost) for mode, cost in costs.items()}}))


def among_tests(name: str) -> Any:
    """The emulation, the counting program and the tiny checkpoints live among the tests."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"tests.{name}")


def layer_kinds() -> Any:
    return among_tests("npu.layer_kinds")


def make_models(folder: Path, kind: Any) -> dict[int, str]:
    """Checkpoints that differ in nothing but their number of layers of that kind."""
    make_checkpoint = among_tests("oracle.tiny_checkpoints").make_checkpoint
    return {count: str(make_checkpoint(folder / f"layers-{count}", kind.model_type, **kind.config(count)))
            for count in layer_kinds().LAYERS}


def measure(mode: str, models: dict[int, str], batch_size: int, folder: Path,
            emulation: dict[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"graph_mode": mode, "dtype": "bfloat16", "vision_cache_bytes": 0}
    if mode != "eager":
        settings |= {"graph_batch_sizes": [batch_size]}
    if mode == "max-autotune":
        settings |= {"use_graph_cache": False}
    spec, results = folder / "spec.json", folder / "results.json"
    spec.write_text(json.dumps({"models": models, "batch_size": batch_size, "settings": settings}))
    done = among_tests("cann.environment").run_python(
        ["-m", "tests.npu.programs.decode_cost", str(spec), str(results)], **emulation)
    if done.returncode != 0:
        raise SystemExit(f"{mode}: {done.stderr[-4000:]}")
    return dict(json.loads(results.read_text()))


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
    return {"launches_per_layer": sum(launched(cost["per_layer"]).values()),
            "launches_beside": sum(launched(cost["rest"]).values()), "per_layer": launched(cost["per_layer"]),
            "host_per_layer": cost["host_per_layer"], "fallbacks": cost["fallbacks"],
            "copies": cost["copies"], "syncs": cost["syncs"], "cache_bytes": cost["cache_bytes"]}


def versions() -> dict[str, str]:
    wheel = next(name for name in among_tests("cann.setup_site").PACKAGES if name.startswith("torch_npu"))
    return {"python": platform.python_version(), "torch": importlib.metadata.version("torch"),
            "torch_npu": wheel.partition("==")[2], "cann": "emulated"}


if __name__ == "__main__":
    main()
