"""Where replicas run: devices and cores of their own, and too many of them refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from npu_runner.errors import ConfigError
from npu_runner.platforms.cuda.platform import CudaPlatform
from npu_runner.platforms.npu.platform import NpuPlatform
from npu_runner.serving.replicas.placement import on_devices, place
from tests.batch.scripted import row, write_rows
from tests.cann.environment import environment
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, on_npu

CORES = list(range(24))
CUDA = CudaPlatform()


def visible(placements: Any) -> list[str]:
    return [placement.environment["CUDA_VISIBLE_DEVICES"] for placement in placements]


def test_replicas_see_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert visible(on_devices(CUDA, 8, CORES, None, 2)) == ["0,1", "2,3", "4,5", "6,7"]
    assert visible(on_devices(CUDA, 8, CORES, 3, 1)) == ["0", "1", "2"]
    threads = {item.environment["OMP_NUM_THREADS"] for item in on_devices(CUDA, 8, CORES, None, 2)}
    assert threads == {str(max(1, len(os.sched_getaffinity(0)) // 8))}


def test_devices_that_the_user_left_visible_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8932f937,2")
    assert visible(on_devices(CUDA, 3, CORES, None, 1)) == ["5", "GPU-8932f937", "2"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")
    npu = NpuPlatform()  # without an Ascend host: only its variables are asked for
    assert npu.share([2, 3], 4)["ASCEND_RT_VISIBLE_DEVICES"] == "6,7"


def test_cores_are_bound_by_who_sees_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica sees one device and all cores of the host, and would think that they are that device's."""
    npu = NpuPlatform()
    monkeypatch.delenv("CPU_AFFINITY_CONF", raising=False)
    near = "mode:1,npu_affine:1"
    for num_cores, num_devices, expected in ((192, 8, near), (64, 8, "0"), (64, 4, near)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=num_cores: set(range(count)))
        assert npu.share([1], num_devices)["CPU_AFFINITY_CONF"] == expected
    monkeypatch.setenv("CPU_AFFINITY_CONF", "mode:2")
    assert "CPU_AFFINITY_CONF" not in npu.share([1], 8), "what the user has set stays"


@pytest.mark.parametrize(("num_replicas", "num_ranks", "message"), [
    (5, 2, "takes 10 devices, 8 are visible; at most 4 replicas have room"),
    (1, 16, "takes 16 devices, 8 are visible; at most 0"),
    (None, 3, "tensor_parallel_size 3 does not divide the 8 devices"),
    (None, 16, "tensor_parallel_size 16 does not divide the 8 devices"),
])  # fmt: skip
def test_more_than_the_host_has_is_refused_by_name(num_replicas: int | None, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_devices(CUDA, 8, CORES, num_replicas, num_ranks)


def test_the_cpu_has_no_devices_to_count() -> None:
    with pytest.raises(ConfigError, match="the cpu platform has cores only; give a number"):
        place("cpu", None, 1)


def test_a_platform_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="platform 'npu' cannot be used here"):
        place("npu", 2, 1)


def test_replicas_on_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 5, 6, 7, 8})
    shares = [placement.cores for placement in place("cpu", 3, 1)]
    assert shares == [{1, 2}, {3, 5}, {6, 7, 8}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    assert [placement.cores for placement in place("cpu", 3, 2)] == [{1}, {3}, {1}]


NPU = [sys.executable, "-m", "npu_runner", "batch", "-i", "in.jsonl", "--platform", "npu", "--max-model-len", "512",
       "--max-num-seqs", "8", "--vision-cache-bytes", "64M", "--preprocessing-workers", "1"]  # fmt: skip


def both_ways(folder: Path, *options: str, look: Callable[[], Any] = lambda: None) -> list[Any]:
    """The job over one device and over all: answers are the same. Returns what `look` saw after each."""
    # The start tries the largest frames of videos that max_model_len allows: 0.6 GiB in float32.
    env = environment(num_devices=2, memory_bytes=2 << 30, allow_fp32_attention=True)
    seen = []
    for name, size in (("one.jsonl", "1"), ("all.jsonl", "auto")):
        done = subprocess.run([*NPU, *options, "-o", name, "--data-parallel-size", size], env=env, cwd=folder,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        seen.append(look())
    one, both = ((folder / name).read_bytes().splitlines() for name in ("one.jsonl", "all.jsonl"))
    assert sorted(one) == sorted(both)
    assert "replica 1 " in done.stderr
    return seen


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.full("two jobs of the npu platform through the command; placement by itself stays")
def test_a_job_over_all_npus_answers_as_one(tmp_path: Path, fixed_time: None) -> None:
    write_rows(tmp_path / "in.jsonl", [row(f"r{n}", f"Hello {n}!", max_tokens=12) for n in range(8)])
    both_ways(tmp_path, "--dtype", "float32", "--attention-backend", "fused", "--enforce-eager")


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.full("three replicas of the npu platform, one compiles; a graph that is loaded stays (tests/cann)")
def test_replicas_load_the_graph_that_an_earlier_one_compiled(
    tmp_path: Path, checkpoint: Any, fixed_time: None
) -> None:
    write_rows(tmp_path / "in.jsonl", [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": [5, 6, 7 + n], "max_tokens": 6, "temperature": 0}} for n in range(8)
    ])  # fmt: skip
    graphs = tmp_path / "graphs"

    def files() -> dict[str, int]:
        return {str(path.relative_to(graphs)): path.stat().st_mtime_ns for path in graphs.rglob("*")
                if path.is_file() and path.suffix != ".lock"}  # fmt: skip

    model = str(checkpoint("qwen3", num_hidden_layers=1))
    compiled, loaded = both_ways(
        tmp_path, "--model", model, "--dtype", "float32", "--attention-backend", "fused", "--graph-mode",
        "max-autotune", "--graph-batch-sizes", "2", "--graph-cache-dir", str(graphs), "--kv-cache-bytes", "4M",
        look=files,
    )  # fmt: skip
    assert any(name.endswith("manifest.json") for name in compiled)
    assert loaded == compiled, "neither was a graph compiled for another device, nor one in its place"


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.full("two processes of the npu platform compile at once; a graph that is loaded stays (tests/cann)")
def test_of_two_that_start_together_one_compiles_and_the_other_waits_and_loads(
    tmp_path: Path, checkpoint: Any
) -> None:
    settings = {"graph_mode": "max-autotune", "graph_batch_sizes": [2], "graph_cache_dir": str(tmp_path / "graphs"),
                "kv_cache_bytes": 4 << 20, **FLOAT32, **SMALL}
    case = Case(str(checkpoint("qwen3", num_hidden_layers=1)), settings, "texts", 2, max_tokens=6)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as threads:
        first, second = (found[0] for found in threads.map(lambda folder: on_npu([case], folder), folders))
    assert {first["graphs"], second["graphs"]} == {"2", "2 (kept from an earlier run: 2)"}
    assert first["tokens"] == second["tokens"]
