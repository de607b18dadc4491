"""A rank that dies, hangs or fails ends the job by name and phase, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann, run_python
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint

pytestmark = pytest.mark.npu
emulated = pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN fails on demand")


def end_of_a_job(model: Path, how: str, folder: Path, *settings: str, **emulation: Any) -> dict[str, Any]:
    segments = set(os.listdir("/dev/shm"))
    results = folder / "end.json"
    done = run_python(["-m", "tests.npu.programs.failing_ranks", str(model), how, "dtype='bfloat16'", *settings,
                       str(results)], **emulation)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(results.read_text())
    assert found["alive"] == []
    assert set(os.listdir("/dev/shm")) <= segments
    return found


@pytest.mark.full("two ranks on the emulation; the same on the cpu platform stays (test_rank_death)")
def test_a_killed_rank_is_named(checkpoint: Any, tmp_path: Path) -> None:
    end = end_of_a_job(checkpoint("qwen3"), "killed", tmp_path)
    assert "rank 1 died (killed by SIGKILL) while" in end["message"]


@emulated
@pytest.mark.full("two ranks there; a collective that times out stays in tests/cann, a stopped rank on the cpu")
def test_a_collective_that_times_out_names_the_rank_that_does_not_answer(checkpoint: Any, tmp_path: Path) -> None:
    # Longer than a busy machine lets one rank lag behind the other while both start; compiling would lag more.
    # One step under way: it is stopped between two steps, never behind its part in a collective of the last one.
    settings = ("graph_mode='eager'", "async_scheduling=False")
    end = end_of_a_job(checkpoint("qwen3"), "stopped", tmp_path, *settings, hccl_timeout_ms=10000)
    assert "rank 0 failed while decode of 1 sequences" in end["message"]
    assert "507048" in end["message"]
    # It launches a step and answers; it may be stopped before or behind that.
    assert "rank 1 has not answered" in end["message"] or "rank 1 is stopped" in end["message"]


@emulated
@pytest.mark.full("two ranks capture; one rank that lacks resources stays")
def test_a_rank_that_fails_while_compiling_says_so(checkpoint: Any, tmp_path: Path) -> None:
    settings = ("graph_mode='reduce-overhead'", "graph_batch_sizes=(2, 4)")
    end = end_of_a_job(checkpoint("qwen3"), "none", tmp_path, *settings, fail="aclmdlRICaptureEnd:4:507899")
    assert "failed while compiling bucket 2" in end["message"]
    assert "507899" in end["message"]


@emulated
@pytest.mark.full("two ranks capture; one rank that cannot stays in tests/oracle/test_generic_graphs.py")
def test_ranks_of_a_transformers_model_that_cannot_capture_run_eagerly(tmp_path: Path) -> None:
    """All of them do: a capture runs nothing, so none waits in a collective."""
    path = make_foreign_checkpoint(tmp_path / "model", "gemma")
    end = end_of_a_job(path, "none", tmp_path, "graph_batch_sizes=(2, 4)", fail="aclmdlRICaptureBegin:1+:507899")
    assert (end["message"], end["graphs"]) == ("", "none")


# Two captures for each bucket, the larger bucket first: the smaller one's find no streams.
GRAPHS = ("graph_mode='reduce-overhead'", "graph_batch_sizes=(2, 4)")
NO_STREAMS = "aclmdlRICaptureBegin:3+:207008"


@emulated
@pytest.mark.full("two ranks capture until none has streams; one rank that lacks them stays")
def test_ranks_that_all_lack_resources_go_on_with_the_graphs_they_have(checkpoint: Any, tmp_path: Path) -> None:
    end = end_of_a_job(checkpoint("qwen3", num_hidden_layers=1), "none", tmp_path, *GRAPHS, fail=NO_STREAMS)
    assert end["message"] == ""
    assert end["graphs"].startswith("4 (stopped at 2: rank 0: ")
    assert "207008" in end["graphs"]


@emulated
@pytest.mark.full("two ranks capture until one of them lacks streams; one rank that lacks them stays")
def test_a_rank_that_lacks_resources_alone_ends_the_start_by_name(checkpoint: Any, tmp_path: Path) -> None:
    """It must not go without that graph alone: its next collective would meet the other rank's of another bucket."""
    end = end_of_a_job(checkpoint("qwen3", num_hidden_layers=1), "none", tmp_path, *GRAPHS, "step_timeout_seconds=40.0",
                       FAIL_OF_THE_VICTIM=NO_STREAMS)
    assert "rank 1" in end["message"]
    assert "207008" in end["message"]
    assert "bucket 2" in end["message"] or "batch size 2" in end["message"]
