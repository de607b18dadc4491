"""Rings beside states: a backend in plain torch has them on the CPU, and what holds of states holds with them.

What a CUDA device runs is held to float64 in tests/cuda. Here it is lengths, slots and the pool that are tried.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.layers.gated_delta import GatedDelta
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.request.speculative import SpeculativeConfig
from npu_runner.runner.states import StatePlan, StatePool, StateShape
from tests.full_set import only_full
from tests.oracle.running import greedy, runner_of
from tests.runner.drafted_answers import knows
from tests.runner.ringed_cpu import LENGTH, RingedCpu, turn_on

SETTINGS: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 4, "max_model_len": 256, "dtype": "float32",
                            "block_size": 16, "max_num_batched_tokens": 128,
                            "kv_cache_bytes": 18 * 2 * 16 * 2 * 32 * 4}  # too few blocks: it must preempt


@pytest.fixture
def with_rings(monkeypatch: pytest.MonkeyPatch, platform_name: str) -> pytest.MonkeyPatch:
    if platform_name != "cpu":
        pytest.skip("a device that has rings has its own")
    turn_on(monkeypatch)
    return monkeypatch


@pytest.fixture(params=["padded", *only_full("steps that nothing pads; padded ones stay", "eager")])
def ringed(request: pytest.FixtureRequest, checkpoint: Any, with_rings: pytest.MonkeyPatch) -> Iterator[LLM]:
    graphs: dict[str, Any] = {}
    if request.param == "padded":
        graphs = {"graph_mode": "reduce-overhead", "graph_batch_sizes": (2, 4)}
    with LLM(checkpoint("qwen3_5_text"), **SETTINGS, **graphs) as llm:
        yield llm


def poison(pool: StatePool) -> None:
    """What sequences before have left may be no number."""
    with torch.inference_mode():
        for tensor in pool.tensors:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def pool_of(llm: LLM) -> StatePool:
    pool = runner_of(llm).states
    assert pool is not None
    assert pool.rings is not None
    return pool


def test_random_traffic_gives_the_tokens_of_states_that_every_step_writes(
        ringed: LLM, checkpoint: Any, with_rings: pytest.MonkeyPatch) -> None:
    """Arrivals at any time, aborts, several answers to a prompt, shared prefixes, preemptions; two steps under way."""
    rng = random.Random(1)
    engine, beginnings = ringed.engine, [rng.choices(range(256), k=length) for length in (70, 130, 5)]
    work = {f"r{index}": ([*rng.choice(beginnings), *rng.choices(range(256), k=rng.randint(1, 40))],
                          rng.randint(1, 25), rng.choice([1, 1, 3])) for index in range(16)}
    poison(pool_of(ringed))
    waiting, aborted, found = list(work), set(), {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 2)):
            if waiting:
                name = waiting.pop()
                prompt, count, n = work[name]
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=n)
                engine.add_request(name, engine.processor.from_text(prompt), params)
        if rng.random() < 0.05:
            aborted.add(name)
            engine.abort_request(name)
        found.update({output.request_id: output for output in engine.step()})
    stats = ringed.stats()
    assert stats.num_preemptions > 0, "the test must force preemption"
    assert stats.state_snapshots_used > 0, "the test must go on from snapshots"
    with_rings.undo()
    names = [name for name in found if name not in aborted]
    with LLM(checkpoint("qwen3_5_text"), **SETTINGS) as plain:
        assert runner_of(plain).states.rings is None  # type: ignore[union-attr]
        for name in names:
            alone = plain.generate([plain.engine.processor.from_text(work[name][0])], greedy(work[name][1]))
            assert all(each.token_ids == alone[0].token_ids for each in found[name].completions), name


@pytest.mark.parametrize("graphs", [
    {"graph_mode": "reduce-overhead", "graph_batch_sizes": (2, 4, 7, 12)},
    *only_full("steps that nothing pads; padded ones stay", {})], ids=["padded", "eager"])
def test_drafts_go_into_rings_and_answers_are_those_without_either(
        graphs: dict[str, Any], checkpoint: Any, platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts beside rows without, plain steps between; preemptions, snapshots, prompts that are cut."""
    if platform_name != "cpu":
        pytest.skip("a device that has rings has its own")
    path = checkpoint("qwen3_5_text")
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=num, ignore_eos=True)
              for seed, num in enumerate((30, 7, 60, 45, 30, 33))]
    prompts = [[*range(70), *range(index)] for index in range(4)] + [[9] * 130, [5]]
    with LLM(path, **SETTINGS) as llm:
        made = [llm.engine.processor.from_text(prompt) for prompt in prompts]
        plain = llm.generate(made, params)
    turn_on(monkeypatch)
    config = {"method": "forced", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[4, 4, 0]]}
    with LLM(path, speculative_config=config, **SETTINGS, **graphs) as llm:
        pool, buckets = pool_of(llm), runner_of(llm).steps.buckets
        assert (pool.rings.length, pool.rings.num_places, pool.plan.num_spares) == (5, 8, 0)
        assert pool.num_bytes == pool.plan.num_bytes
        if buckets is not None:
            # A step with drafts has up to three rows, and twelve tokens.
            assert [(bucket.batch_size, bucket.drafted is None, bucket.drafted is bucket.forward)
                    for bucket in buckets.compiled()] == [(12, False, True), (7, False, True), (4, False, False),
                                                          (2, False, False)]
        poison(pool)
        knows(llm, plain, 3, 0.3)
        llm.engine._drafter._config = SpeculativeConfig.from_mapping(config)
        drafted = llm.generate(made, params)
        stats = llm.stats()
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 30


def test_made_up_steps_leave_rings_alone(ringed: LLM) -> None:
    pool = pool_of(ringed)
    if ringed.engine.info.graphs != "eager":
        assert not any(bool(tensor.count_nonzero()) for tensor in pool.tensors), "graphs were made over them"
    prompts = [ringed.engine.processor.from_text("which of the pictures " * count) for count in (1, 4)]
    expected = [output.token_ids for output in ringed.generate(prompts, greedy())]
    for index, prompt in enumerate(prompts):
        ringed.engine.add_request(str(index), prompt, greedy())
    for _ in range(5):
        ringed.engine.step()
    before = [tensor.clone() for tensor in pool.tensors]
    runner = runner_of(ringed)
    runner.profile_run()
    runner.dummy_run(64, 3, expected_decode_len=2)
    num_seqs = pool.plan.max_num_seqs
    assert all(torch.equal(tensor[:, :num_seqs], old[:, :num_seqs])
               for tensor, old in zip(pool.tensors, before, strict=True))
    found = []
    while ringed.engine.has_unfinished_requests():
        found += ringed.engine.step()
    assert [each.completions[0].token_ids for each in sorted(found, key=lambda output: output.request_id)] == expected


def test_a_state_is_written_every_few_steps_only(ringed: LLM) -> None:
    pool, changes = pool_of(ringed), []
    ringed.engine.add_request("0", ringed.engine.processor.from_text("which of the pictures"), greedy(3 * LENGTH + 2))
    while ringed.engine.has_unfinished_requests():
        before = pool.states[:, : pool.plan.max_num_seqs].clone()
        ringed.engine.step()
        changes.append(not torch.equal(pool.states[:, : pool.plan.max_num_seqs], before))
    assert changes[:2] == [False, True], "a step is planned; a prompt leaves its state"
    assert sum(changes) == 1 + 3


def test_the_ledger_counts_what_rings_take() -> None:
    layer = GatedDeltaShape(num_k_heads=2, num_v_heads=6, head_k_dim=24, head_v_dim=40, conv_kernel_size=4)
    for ring_length in (0, 8):
        shape = StateShape(num_layers=3, layer=layer, element_bytes=2, ring_length=ring_length)
        plan = StatePlan(max_num_seqs=4, num_padding=1, num_snapshots=2, bytes_per_slot=shape.bytes_per_slot)
        model = torch.nn.ModuleList(GatedDelta(index, _Context()) for index in range(3))  # type: ignore[arg-type]
        pool = StatePool(plan, shape, model, torch.bfloat16, torch.device("cpu"))
        assert pool.num_bytes == plan.num_bytes
        assert all((module.ring is not None) == bool(ring_length) for module in model)


class _Context:
    gated_delta = RingedCpu(GatedDeltaShape(num_k_heads=2, num_v_heads=6, head_k_dim=24, head_v_dim=40,
                                            conv_kernel_size=4))
