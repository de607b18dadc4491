"""A runner that is ready may be profiled, warmed up and closed: it serves on as before, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.request.outputs import RequestOutput
from npu_runner.runner.base import MemoryProfile
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.full_set import only_full
from tests.oracle.running import UncompiledGraphs, runner_of

SETTINGS = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 512}
CONVERSATIONS = [draw_example(seed).conversation() for seed in TEST_SEEDS[:3]]
# Seeds, counts and uniforms: all of the sampler's state shows in the tokens.
PARAMS = SamplingParams(temperature=4.0, seed=7, max_tokens=12, ignore_eos=True, repetition_penalty=1.3,
                        frequency_penalty=0.3)


@pytest.fixture
def llm(platform_name: str) -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform=platform_name, **SETTINGS) as llm:
        yield llm


def start(llm: LLM, name: str) -> None:
    for index, conversation in enumerate(CONVERSATIONS):
        llm.engine.add_request(f"{name}-{index}", llm.engine.processor(conversation), PARAMS)


def finish(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    return sorted(outputs, key=lambda output: output.request_id)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("what", ["profile_run", *only_full(
    "a step of another size; with states both stay (test_state_pool.py)", "dummy_run")])
def test_a_made_up_step_in_the_midst_of_a_job_changes_none_of_its_tokens(what: str, llm: LLM) -> None:
    start(llm, "undisturbed")
    expected = tokens(finish(llm))
    start(llm, "disturbed")
    for _ in range(5):
        llm.engine.step()
    before = llm.stats()
    runner = runner_of(llm)
    caches = (runner.k_cache,)
    if what == "profile_run":
        assert runner.profile_run().weights_bytes > 0
    else:
        runner.dummy_run(64, 4, expected_decode_len=2)
    after = llm.stats()
    assert runner.k_cache is caches[0]
    assert after.num_images_encoded == before.num_images_encoded
    assert after.vision_cache_bytes == before.vision_cache_bytes
    assert after.prepare_seconds == before.prepare_seconds
    assert tokens(finish(llm)) == expected


def test_a_made_up_step_takes_no_answer_about_a_rule(llm: LLM) -> None:
    runner = runner_of(llm)
    rule = 'start: "a"'
    assert runner.build_rules([(1, rule)], patience=60.0) == {1: None}
    runner._matchers.ask([(2, rule)])  # built already: the next step that is collected would tell of it
    runner.dummy_run(64, 4, expected_decode_len=2)
    assert runner.build_rules([], patience=0.0) == {2: None}


def test_caches_behind_a_capture_are_zeros_and_stay_where_they_are(
        platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps their addresses, and its first steps leave keys of made-up tokens (vllm-ascend #17659)."""
    if platform_name == "cpu":
        monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: UncompiledGraphs())
    with LLM(SHAPES_VL, platform=platform_name, graph_mode="reduce-overhead", graph_batch_sizes=(2,),
             **SETTINGS) as llm:
        runner = runner_of(llm)
        caches = runner.k_cache, runner.v_cache
        assert not any(cache.any() for cache in caches)
        with pytest.raises(AssertionError, match="graphs read the block tables where they are"):
            runner.allocate_kv_cache(MemoryProfile())
        assert runner.k_cache is caches[0]
        assert runner.v_cache is caches[1]


def test_a_closed_runner_holds_no_cache_and_no_weights(platform_name: str) -> None:
    llm = LLM(SHAPES_VL, platform=platform_name, **SETTINGS)
    start(llm, "job")
    finish(llm)
    runner = runner_of(llm)
    held = [weakref.ref(tensor) for tensor in (runner.k_cache, *runner.model.parameters(), *runner.model.buffers())]
    gc.disable()  # a full collection takes as long as the caller's program is large: nothing waits for one
    try:
        llm.close()
    finally:
        gc.enable()
    assert [ref() for ref in held if ref() is not None] == [], "the runner itself is still held"
    runner.close()  # twice is once
    assert np.isfinite(llm.stats().prepare_seconds)
