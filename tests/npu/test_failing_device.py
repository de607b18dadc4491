"""Whatever the device runs out of: the right tokens, or an error that says where and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_runner.assets import SHAPES_VL
from tests.cann.environment import has_real_cann, run_python
from tests.full_set import only_full

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN fails on demand"),
]

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 4,
                            "vision_cache_bytes": 1 << 24, "dtype": "bfloat16"}
BUCKETS = [1, 4]
NO_MEMORY, NO_RESOURCES, NO_STREAMS = 207001, 207005, 207008
SERVING = "serving "  # such a failure counts from when the model stands ready


def runs(model: Path, failures: list[str], folder: Path, undisturbed: dict[str, Any] | None = None, **settings: Any
         ) -> dict[str, dict[str, Any]]:
    """How the job ended under each failure; "" is the undisturbed one, which may have other settings."""
    spec = {"failures": ["", *failures], "settings": {"model": str(model), **SETTINGS, **settings},
            "undisturbed": undisturbed or {}}
    (folder / "spec.json").write_text(json.dumps(spec))
    done = run_python(["-m", "tests.npu.programs.failing_device", str(folder / "spec.json"), str(folder / "out.json")],
                      timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "out.json").read_text())
    assert "tokens" in found[""], found[""]
    return found


def assert_right_or_explained(found: dict[str, dict[str, Any]]) -> list[str]:
    """The errors of the runs that ended in one."""
    errors = []
    for failure, result in found.items():
        if "tokens" in result:
            assert result["tokens"] == found[""]["tokens"], failure
            continue
        assert result["error"] in ("OutOfMemoryError", "EngineDeadError", "GivenUp"), (failure, result)
        assert "device memory ran out" in result["message"], (failure, result)
        assert "lower max_num_batched_tokens" in result["message"], (failure, result)
        errors.append(result["error"])
    return errors


@pytest.mark.full("a sweep over the allocations of a start; memory that comes back stays")
def test_memory_that_is_gone_for_good_ends_the_job_with_the_ledger(tmp_path: Path) -> None:
    """From every allocation of the run on, all fail."""
    failures = [f"aclrtMallocPhysical:{number}+:{NO_MEMORY}" for number in range(1, 10, 2)]
    failures += [f"{SERVING}aclrtMallocPhysical:{number}+:{NO_MEMORY}" for number in (*range(1, 8, 2), 100)]
    found = runs(SHAPES_VL, failures, tmp_path, graph_batch_sizes=[4])
    errors = assert_right_or_explained(found)
    assert errors.count("OutOfMemoryError") >= 5, "weights, profile and cache"
    # Smaller steps often find room in what the allocator holds already, and then the tokens are the right ones.
    assert errors.count("EngineDeadError") + errors.count("GivenUp") >= 1, "serving"
    assert len(errors) < len(failures), "the sweep went past the last allocation"
    serving = [result["message"] for result in found.values() if result.get("error") == "EngineDeadError"]
    assert all("memory ledger" in message and "KV cache" in message for message in serving)


@pytest.mark.parametrize("numbers", [(1,), *only_full("more starts; one stays", ((1, 2, 4),))])
def test_memory_that_comes_back_costs_a_second_try(numbers: tuple[int, ...], checkpoint: Any, tmp_path: Path) -> None:
    """Three allocations in a row fail: more than the allocator's own second try bears."""
    failures = [f"{SERVING}aclrtMallocPhysical:{number}-{number + 2}:{NO_MEMORY}" for number in numbers]
    found = runs(checkpoint("qwen3_vl"), failures, tmp_path, graph_mode="eager")
    assert_right_or_explained(found)
    assert any(result.get("num_retries") for result in found.values()), found


@pytest.mark.full("a sweep over starts, one after the other; memory that runs out while serving stays")
def test_memory_that_runs_out_while_graphs_are_captured(checkpoint: Any, tmp_path: Path) -> None:
    failures = [f"aclrtMallocPhysical:{number}+:{NO_MEMORY}" for number in range(1, 12, 2)]
    found = runs(checkpoint("qwen3", num_hidden_layers=1), failures, tmp_path, graph_mode="reduce-overhead",
                 graph_batch_sizes=BUCKETS)
    assert_right_or_explained(found)


def test_graphs_that_find_no_resources_run_eagerly(checkpoint: Any, tmp_path: Path) -> None:
    """Two captures for each bucket, the larger bucket first. Tokens are those of eager steps."""
    failures = [f"aclmdlRICaptureBegin:3+:{NO_STREAMS}"]
    found = runs(checkpoint("qwen3", num_hidden_layers=1), failures, tmp_path, graph_mode="reduce-overhead",
                 graph_batch_sizes=BUCKETS, undisturbed={"graph_mode": "eager", "graph_batch_sizes": None})
    for failure, result in found.items():
        assert result.get("tokens") == found[""]["tokens"], (failure, result)
    assert found[""]["graphs"] == "eager"
    assert found[failures[0]]["graphs"].startswith("4 (stopped at 1: ")
    assert str(NO_STREAMS) in found[failures[0]]["graphs"]


@pytest.mark.full("one more start each; the first capture of the second bucket stays")
def test_graphs_that_find_none_from_another_capture_on_run_eagerly(checkpoint: Any, tmp_path: Path) -> None:
    failures = [f"aclmdlRICaptureBegin:{number}+:{code}"
                for number, code in ((1, NO_RESOURCES), (2, NO_STREAMS), (4, NO_RESOURCES))]
    found = runs(checkpoint("qwen3", num_hidden_layers=1), failures, tmp_path, graph_mode="reduce-overhead",
                 graph_batch_sizes=BUCKETS)
    for failure, result in found.items():
        assert result.get("tokens") == found[""]["tokens"], (failure, result)
    assert found[failures[0]]["graphs"] == "none"


def test_a_device_that_takes_no_work_any_more_is_noticed(checkpoint: Any) -> None:
    """torch_npu loses errors; what it drops afterwards leaves the tokens of earlier steps in the device's memory."""
    assert_is_noticed("eager", checkpoint)


@pytest.mark.full("graphs are captured twice; eager steps stay, whose receipts are checked by the same lines")
def test_a_device_that_takes_no_graph_any_more_is_noticed(checkpoint: Any) -> None:
    assert_is_noticed("reduce-overhead", checkpoint)


def assert_is_noticed(graph_mode: str, checkpoint: Any) -> None:
    model = checkpoint("qwen3", num_hidden_layers=1)
    done = run_python(["-m", "tests.npu.programs.lost_error", str(model), graph_mode], timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["first"]) == 6
    assert "second" not in result, result
    assert result["error"] == "EngineDeadError"
    assert "the device did not run the prefill of 1 sequences" in result["message"]
    assert "ASCEND_LAUNCH_BLOCKING=1" in result["message"]
