"""Activations of worst steps: what a device measures, beside the bound of `npu-runner doctor --fits`.

    python scripts/bench_estimate.py --platform cuda [--size tiny]

Models of real shapes with random weights, one after the other; nothing is generated. The cpu platform measures nothing:
there the script only shows that it works.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench_common import commit, versions
from bench_device_shapes import make_text_model, make_vision_model

from npu_runner.config import RunnerConfig
from npu_runner.platforms import find_platform
from npu_runner.request.limits import GIB
from npu_runner.runner.estimate import estimate_memory
from npu_runner.runner.model_runner import ModelRunner
from npu_runner.strategies import open_checkpoint

_SIDE = 1280
_RUNS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "real": [
        ("qwen3-0.6b", {}),
        ("qwen3-8b", {}),
        ("qwen3-8b", {"max_num_seqs": 16, "max_num_batched_tokens": 16384}),
        ("qwen3-vl-4b", {}),
        ("qwen3-vl-4b", {"max_num_seqs": 32}),
    ],
    "tiny": [("tiny", {"max_num_seqs": 4}), ("tiny-vl", {"max_num_seqs": 4})],
}


def compare(folder: Path, name: str, settings: dict[str, Any], platform: str) -> dict[str, Any]:
    """Bytes: the allocator's peak of the worst step less what stands, and the bound; the images of the next step."""
    path = make_vision_model(folder, name, _SIDE) if "vl" in name else make_text_model(folder, name)
    config = RunnerConfig.from_keywords(path, platform=platform, load_format="dummy", kv_cache_bytes=GIB,
                                        enforce_eager=True, **settings)
    opened = open_checkpoint(config)
    bound = estimate_memory(opened.strategy, config, find_platform(platform), 1 << 50).profile
    runner = ModelRunner(opened)
    measured = runner.profile_run()
    runner.close()
    return {"model": name, **settings, "measured": measured.activation_peak_bytes,
            "bound": bound.activation_peak_bytes, "staging_measured": measured.staging_bytes,
            "staging_bound": bound.staging_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", required=True)
    parser.add_argument("--size", choices=_RUNS, default="real")
    arguments = parser.parse_args()
    results = []
    for name, settings in _RUNS[arguments.size]:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(Path(folder), name, settings, arguments.platform)
        results.append(found)
        share = f"{found['bound'] / found['measured']:.2f}" if found["measured"] else "not measured"
        print(f"{name:<12} {settings or 'defaults'!s:<60} {found['measured']:>14,} {found['bound']:>14,}  {share}",
              flush=True)
    print(json.dumps({"commit": commit(), **versions("torch"), "platform": arguments.platform, "results": results}))


if __name__ == "__main__":
    main()
