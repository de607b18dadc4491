"""The table of sizes in docs/running-on-ascend.md: what `npu-runner doctor --fits` says of published models.

    python scripts/sizing_table.py [--platform npu] [MODEL ...]

The shapes are those of the published config.json files; images may be as large as their preprocessors allow. No weights
are read and no device is used.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.shapes import TEXT, vision_config
from npu_runner.cli.checkpoint_folder import checkpoint_folder
from npu_runner.config import RunnerConfig
from npu_runner.platforms import find_platform
from npu_runner.request.limits import GIB
from npu_runner.runner.estimate import estimate_memory, fewest_ranks
from npu_runner.strategies import pick_strategy

DEVICES = (64, 32)  # GiB
LENGTH = 32768
"""max_model_len: one sequence as long must fit."""
MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-VL-2B",
          "Qwen3-VL-4B", "Qwen3-VL-8B", "Qwen3-VL-32B")


def config_of(model: str) -> dict[str, Any]:
    """The published config.json, as far as anything of it takes memory."""
    return TEXT.get(model.lower()) or vision_config(model.lower())


def row(model: str, platform_name: str) -> str:
    """One line of the table: for each size of a device the fewest ranks, what they take, and what the cache holds."""
    platform = find_platform(platform_name)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.json"
        file.write_text(json.dumps(config_of(model)))
        with checkpoint_folder(str(file), None) as folder:
            strategy = pick_strategy(folder)
            config = RunnerConfig(model=str(folder), platform=platform_name, max_model_len=LENGTH)
            cells: list[str] = []
            for gib in DEVICES:
                found = estimate_memory(strategy, config, platform, gib * GIB)
                if not found.fits:
                    ranks = fewest_ranks(strategy, config, platform, gib * GIB)
                    assert ranks is not None, f"{model} fits no number of ranks"
                    found = estimate_memory(strategy, config.replace(tensor_parallel_size=ranks), platform, gib * GIB)
                profile = found.profile
                cells += [str(found.num_ranks), f"{profile.weights_bytes / GIB:.1f}",
                          f"{profile.activation_peak_bytes / GIB:.1f}", f"{found.num_tokens:,}",
                          str(found.num_sequences)]
    return "| " + " | ".join([model, *cells]) + " |"


def table(models: tuple[str, ...], platform_name: str) -> Iterator[str]:
    heads = [f"{gib} GiB: {what}" if index == 0 else what for gib in DEVICES
             for index, what in enumerate(("ranks", "weights", "activations", "tokens", "sequences"))]
    yield "| " + " | ".join(["model", *heads]) + " |"
    yield "|---" * (1 + len(heads)) + "|"
    for model in models:
        yield row(model, platform_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS, help=", ".join(MODELS))
    parser.add_argument("--platform", default="npu")
    arguments = parser.parse_args()
    for line in table(tuple(arguments.models), arguments.platform):
        print(line, flush=True)


if __name__ == "__main__":
    main()
