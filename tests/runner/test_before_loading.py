"""What a start says while it loads, and what it refuses before it reads a weight."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from npu_runner import LLM
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.config import RunnerConfig
from npu_runner.engine.bounds import settings_before_loading
from npu_runner.engine.executors import shared_memory
from npu_runner.engine.executors.rank_channel import Record
from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import ConfigError
from npu_runner.platforms.cpu.devices import free_bytes
from npu_runner.platforms.graphs import InductorCompiler
from npu_runner.strategies import open_checkpoint

SMALL: dict[str, Any] = {"platform": "cpu", "kv_cache_bytes": 1 << 22, "max_model_len": 64, "max_num_seqs": 4}
MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that leaves the step as it is: what is said of graphs does not depend on them."""
    monkeypatch.setattr(InductorCompiler, "compile", lambda self, forward, batch_size: forward)


def test_weights_and_graphs_are_counted_and_what_was_known_before_is_what_is_served(
    checkpoint: Callable[..., Path], eager_graphs: None
) -> None:
    folder, said = checkpoint("qwen3"), list[str]()
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    opened = open_checkpoint(RunnerConfig.from_keywords(folder, **SMALL, graph_mode="reduce-overhead", seed=3))
    known = settings_before_loading(opened)
    with LLMEngine(opened, progress=said.append) as engine:
        runs = {**engine.info.description, "max_model_len": str(engine.info.max_model_len)}
    told = {"seed": "3", "tensor_parallel_size": "1", "max_model_len": "64", "graph_mode": "reduce-overhead"}
    assert known == {**told, "platform": "cpu", "dtype": "float32"}
    assert all(runs.get(name, known[name]) == known[name] for name in known)
    weights = [phase for phase in said if phase.startswith("loading weights: ")]
    assert min(len(tensors) // 2, 50) <= len(weights) <= 100
    num_bytes = (folder / "model.safetensors").stat().st_size
    assert weights[-1].endswith(f" KiB of {num_bytes / 1024:.1f} KiB")
    graphs = [phase for phase in said if phase.startswith("compiling bucket")]
    assert graphs == [f"compiling bucket {size} (graph {number} of 3)" for number, size in ((1, 4), (2, 2), (3, 1))]
    order = [said.index(phase) for phase in ("loading weights", weights[0], "profiling memory", graphs[0])]
    assert order == sorted(order)


def test_whole_experts_are_another_arithmetic_where_there_are_ranks(checkpoint: Callable[..., Path]) -> None:
    def known(num_ranks: int, **settings: Any) -> dict[str, str]:
        return settings_before_loading(open_checkpoint(RunnerConfig.from_keywords(
            checkpoint("qwen3_moe"), **SMALL, tensor_parallel_size=num_ranks, **settings)))

    assert known(2, enable_expert_parallel=True) == {**known(2), "enable_expert_parallel": "true"}
    assert known(1, enable_expert_parallel=True) == known(1), "one rank holds all experts either way"
    with pytest.raises(ConfigError, match="8 experts are fewer than the 9 ranks of tensor_parallel_size"):
        known(9, enable_expert_parallel=True)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_a_reader_counts_each_tensor_once(checkpoint: Callable[..., Path], max_shard_size: str) -> None:
    folder, told = checkpoint("qwen3", max_shard_size=max_shard_size), list[tuple[int, int]]()
    files = sorted(folder.glob("*.safetensors"))
    with CheckpointReader(folder, lambda *counts: told.append(counts)) as reader:
        for name in sorted(reader.names):
            first = reader.shape(name)[0]
            for start in (0, first // 2):  # in two slices, as a rank of two reads what experts share
                reader.read(name, 0, start, first // 2)
    read = [num_read for num_read, _ in told]
    assert read == sorted(set(read)), "it only grows"
    assert {num_bytes for _, num_bytes in told} == {sum(file.stat().st_size for file in files)}
    everything = sum(tensor.nbytes for file in files for tensor in safetensors.numpy.load_file(file).values())
    assert 0.98 * everything <= read[-1] <= everything


def test_an_llm_says_what_it_does_on_a_terminal_and_nothing_elsewhere(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        LLM(checkpoint("qwen3"), **SMALL, graph_mode="eager").close()
        said.append(stream.getvalue())
    lines = said[0].split("\r")
    assert any(line.startswith("loading weights: ") for line in lines)
    assert any(line.strip() == "profiling memory" for line in lines)
    assert not lines[-1].strip(), "the line is gone at the end"
    assert "loading" not in said[1]


def cgroup_2(group: str, limit: str) -> dict[str, str]:
    files = {"max": limit, "current": str(60 * MIB), "stat": f"anon 5\ninactive_file {8 * MIB}\n"}
    return {f"sys/fs/cgroup/{group}/memory.{name}": text for name, text in files.items()}


@pytest.mark.parametrize(("files", "room"), [
    ({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 7000 kB\n"}, 7000 * 1024),
    ({}, None),
    ({"proc/meminfo": "MemAvailable: 7000000 kB\n", "proc/self/cgroup": "0::/a/b\n",
      **cgroup_2("a/b", limit="max"), **cgroup_2("a", limit=str(100 * MIB))}, 48 * MIB),  # of the outer one
    ({"proc/meminfo": "MemAvailable: 7000000 kB\n", "proc/self/cgroup": "3:cpu,memory:/docker/x\n1:name=systemd:/\n",
      "sys/fs/cgroup/memory/memory.limit_in_bytes": str(50 * MIB),
      "sys/fs/cgroup/memory/memory.usage_in_bytes": str(20 * MIB),
      "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * MIB}\n"}, 35 * MIB),
], ids=["no limit", "no Linux", "cgroup 2", "cgroup 1 in a container"])  # fmt: skip
def test_what_is_free_is_the_least_that_kernel_and_containers_leave(
    tmp_path: Path, files: dict[str, str], room: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path) == room


def test_the_first_of_several_ranks_is_heard_while_all_start(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, said = iter(["importing", "importing", "loading weights", "loading weights: 1 of 2"]), list[str]()
    executor: Any = object.__new__(SharedMemoryExecutor)

    class Starting:
        """A rank that answers once it has told all of its phases."""

        num_answered = 0
        child = type("Running", (), {"is_running": True, "is_ending": False,
                                     "is_stopped_for": lambda self, seconds: False})()
        wire = type("Wire", (), {"fileno": lambda self: 0, "pop": lambda self: None,
                                 "peek": lambda self: Record(1, 0)})()
        told = ""

        def phase(self) -> str:
            self.told = next(phases, self.told)
            return self.told

        def book(self, reply: Record) -> None:
            self.num_answered = reply.number

    rank = Starting()
    executor._ranks, executor._progress, executor._phase = [rank], said.append, ""
    executor._last = shared_memory._Call(1, 0, 60.0, "start")
    monkeypatch.setattr(shared_memory, "wait", lambda descriptors, timeout: [0] if "1 of 2" in rank.told else [])
    executor._wait_for_answers(1)
    assert said == ["importing", "loading weights", "loading weights: 1 of 2"]
