"""Runs programs on the npu platform: in a process of its own, on the emulated CANN where there is no other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from npu_runner.platforms.npu.preflight.vendor_packages import is_called
from tests.cann.environment import run_python
from tests.npu.programs.generate import Case, run_case

# What makes a test of a second out of one of a minute on two cores.
DEVICE_MEMORY = 1 << 30
# Vision embeddings of the tests are kilobytes. The worst step runs once in each start; with the platform's own limit of
# tokens the emulation computes on it for seconds.
SMALL = {"max_model_len": 512, "max_num_seqs": 8, "vision_cache_bytes": 1 << 26, "max_num_batched_tokens": 512}
# The kernel of a device takes float16 and bfloat16; the emulation takes float32, too, so that tokens can be compared
# one by one. Asked for by name, the platform hands it on.
FLOAT32 = {"dtype": "float32", "attention_backend": "fused"}


def on_npu(cases: list[Case], folder: Path, **emulation: Any) -> list[dict[str, Any]]:
    """Results of `cases`, in one process."""
    entries = [dataclasses.asdict(dataclasses.replace(case, settings={"platform": "npu", **case.settings}))
               for case in cases]
    (folder / "cases.json").write_text(json.dumps(entries))
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    options = {"memory_bytes": DEVICE_MEMORY, "allow_fp32_attention": True, "loads_kernels": True,
               "counters": folder / "counters_%p", **emulation}
    done = run_python(["-m", "tests.npu.programs.generate", str(folder / "cases.json"), str(results)], timeout=900,
                      **options)
    assert done.returncode == 0, done.stderr[-8000:]
    assert unknown_launches(folder) == set()
    found: list[dict[str, Any]] = json.loads(results.read_text())
    for result in found:
        result["stderr"] = done.stderr
    return found


def unknown_launches(folder: Path) -> set[str]:
    """Functions that a run launched, and that the doctor does not look for in packages of vendors. Ranks end without
    writing what they counted."""
    counted = [json.loads(path.read_text()) for path in folder.glob("counters_*")]
    launched = {name for groups in counted for group in ("launches", "replayed") for name in groups.get(group, {})}
    return {name for name in launched if name.startswith("aclnn") and not is_called(name)}


def on_cpu(case: Case) -> dict[str, Any]:
    """The same on the cpu platform, eagerly, with one rank, in this process."""
    names = "max_model_len", "max_num_seqs", "dtype", "hidden_state_layers", "logprobs_mode"
    keep = {name: value for name, value in case.settings.items() if name in names}
    result = run_case(dataclasses.replace(case, settings={**keep, "platform": "cpu"}))
    return dict(json.loads(json.dumps(result)))


def assert_graphs_are_whole(result: dict[str, Any], sizes: list[int]) -> None:
    """Every bucket has its graph, and serving made no new one."""
    assert result["graphs"].partition(" (")[0] == ", ".join(map(str, sizes))
    assert result["after"] == result["before"], "nothing is traced, captured or compiled after warm-up"
    if "captured" in result["after"]:  # only the emulated device counts
        made = result["after"]["captured"] + result["after"]["compiled"]
        assert made >= len(sizes), result["after"]
