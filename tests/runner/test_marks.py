"""A rank that samples nothing knows when a step has run, and waits where the next one changes what it reads."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from npu_runner import LLM, SamplingParams
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.transfers import Download
from tests.full_set import only_full
from tests.oracle.running import UncompiledGraphs, runner_of


class Event:
    """Of a device that has not come so far before somebody waits."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_done = True


@pytest.mark.parametrize("waits_for_replay", [True, *only_full("one that is not replayed", False)])
def test_the_next_step_waits_for_one_that_brings_nothing(waits_for_replay: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    graphs = UncompiledGraphs()
    graphs.waits_for_replay = waits_for_replay
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: graphs)

    def download(tensor: Tensor) -> Download:
        events.append(Event())
        return Download(tensor.cpu(), events[-1])

    with LLM("shapes-vl", platform="cpu", max_num_seqs=2, max_model_len=256, kv_cache_bytes=1 << 22,
             async_scheduling=True, graph_mode="reduce-overhead", graph_batch_sizes=(1,)) as llm:
        engine, runner = llm.engine, runner_of(llm)
        steps = runner.steps
        monkeypatch.setattr(steps, "sampler", None)
        monkeypatch.setattr(steps, "record_tokens", lambda step, sampled: None)  # the first rank's would come
        monkeypatch.setattr(steps.platform.memory, "download", download)
        engine.add_request("a", engine.processor.from_text("what colour"), SamplingParams(max_tokens=4))
        batches = [engine.scheduler.schedule() for _ in range(2)]
        first, second = (runner.submit(batch) for batch in batches if batch is not None)
        assert np.array_equal([event.num_waits for event in events], [1, 0] if waits_for_replay else [])
        assert first.is_done()
        assert second.is_done() is not waits_for_replay
        assert runner.collect(first) is None
        second.wait()
        assert second.is_done()
        engine.reset()
