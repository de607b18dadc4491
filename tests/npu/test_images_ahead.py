"""Images on the emulated device: what a step's cost, counted, and that they come ahead of it, whatever fails then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.cann.environment import has_real_cann, run_python
from tests.npu.programs.images_ahead import CHUNKS, FAULT, PARAMS, SETTINGS, prompt_of_all, prompts_of

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts, and fails on demand"),
]

# What outlives the pixels is put aside; gather, cast, times, minus, over, cast again.
MOST_LAUNCHES = 7
# Each image's embeddings and its two deepstack levels are cut out of the call's.
COPIES_OF_AN_IMAGE = 3
# The step's arrays, its images with where their patches stand, and the settings of a new row of the sampler.
COPIES_TO_THE_DEVICE = 3
MEMORY_COMES_BACK, MEMORY_IS_GONE = "aclrtMallocPhysical:1-3:207001", "aclrtMallocPhysical:1+:207001"


def results_of(program: str, model: Path, folder: Path, *arguments: str, **emulation: Any) -> Any:
    results = folder / "out.json"
    done = run_python(["-m", f"tests.npu.programs.{program}", str(model), str(results), *arguments],
                      allow_fp32_attention=True, **emulation)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(results.read_text())


def num_calls(entries: dict[str, dict[str, int]]) -> int:
    return sum(entry["calls"] for entry in entries.values())


@pytest.fixture(scope="module")
def cost(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = results_of("image_cost", checkpoint("qwen3_vl"), tmp_path_factory.mktemp("cost"))
    return found


@pytest.fixture(scope="module")
def tokens_on_cpu(checkpoint: Any) -> list[list[int]]:
    with LLM(checkpoint("qwen3_vl"), platform="cpu", **SETTINGS) as llm:
        return [output.token_ids for output in llm.generate(prompts_of(llm), PARAMS)]


def test_images_of_eight_sizes_are_sent_by_one_copy_and_cut_by_seven_launches(cost: dict[str, Any]) -> None:
    for count in ("1", "8"):
        staging = cost[count]["staging"]
        assert staging["copies"]["h2d"]["calls"] == 1
        assert num_calls(staging["launches"]) <= MOST_LAUNCHES, staging["launches"]
        assert staging["syncs"] == {}, "the host waits for nothing"


def test_a_step_with_eight_images_copies_as_often_as_one_with_one(cost: dict[str, Any]) -> None:
    one, eight = cost["1"]["step"], cost["8"]["step"]
    assert eight["copies"]["h2d"]["calls"] == one["copies"]["h2d"]["calls"] == COPIES_TO_THE_DEVICE
    assert (one["copies"]["d2h"]["calls"], eight["copies"]["d2h"]["calls"]) == (1, 1)
    assert num_calls(eight["launches"]) - num_calls(one["launches"]) == 7 * COPIES_OF_AN_IMAGE
    assert num_calls(eight["syncs"]) == 1, "the sampled token is waited for, once"


def test_images_are_staged_on_a_stream_beside_while_a_step_runs(
    checkpoint: Any, tokens_on_cpu: list[list[int]], tmp_path: Path
) -> None:
    """Nothing runs here before somebody waits, and the first images last of all: a tower that did not wait for its
    patches would see none."""
    found = results_of("images_ahead", checkpoint("qwen3_vl"), tmp_path, "", lazy=True)
    (result,) = found["runs"]
    assert result["tokens"] == tokens_on_cpu
    assert len(result["seen"]) > 1
    assert all(seen["beside"] for seen in result["seen"])
    assert result["seen"][1]["step_runs"]
    assert "images of the next step" in result["ledger"]
    assert not found["reuses_memory"], "patches that a step has not read yet are overwritten by the next one's"


def test_images_of_one_step_at_most_are_ahead_of_the_tower(checkpoint: Any, tmp_path: Path) -> None:
    """Chunks in the middle of a prompt bring nothing that anybody waits for, and the ledger counts one staged step."""
    with LLM(checkpoint("qwen3_vl"), platform="cpu", **SETTINGS) as llm:
        expected = [output.token_ids for output in llm.generate(prompt_of_all(llm), PARAMS)]
    (result,) = results_of("images_ahead", checkpoint("qwen3_vl"), tmp_path, CHUNKS, lazy=2)["runs"]
    assert result["tokens"] == expected
    assert max(seen["num_unread"] for seen in result["seen"]) <= 1
    assert len(result["seen"]) > 3


@pytest.mark.full("two engines, one of which gives up each row; memory that runs out in steps with images stays")
def test_memory_that_runs_out_while_images_are_staged(
    checkpoint: Any, tokens_on_cpu: list[list[int]], tmp_path: Path
) -> None:
    back, gone = results_of("images_ahead", checkpoint("qwen3_vl"), tmp_path, MEMORY_COMES_BACK,
                            MEMORY_IS_GONE)["runs"]
    assert back["num_retries"] == 1
    assert back["tokens"] == tokens_on_cpu
    assert back["num_encoded"] == len(tokens_on_cpu), "the tower has seen each image once"
    assert set(gone["given_up"]) == {"out_of_memory"}
    for tokens, expected in zip(gone["tokens"], tokens_on_cpu, strict=True):
        assert tokens == expected[: len(tokens)]


@pytest.mark.full("waits for what never comes; steps of a device that fails stay")
def test_a_device_that_fails_while_images_are_staged_is_named(checkpoint: Any, tmp_path: Path) -> None:
    """Not waited for for ever, though the event that the step waits for is never recorded."""
    (result,) = results_of("images_ahead", checkpoint("qwen3_vl"), tmp_path, FAULT)["runs"]
    assert result["error"] == "EngineDeadError"
    assert "aclnnEmbedding: indices holds 1048576" in result["message"]
    assert "tokens" not in result
