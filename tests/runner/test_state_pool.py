"""The pool of states: its place in the ledger, what it bounds, and that each step touches its own slots alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import ConfigError, OutOfMemoryError
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.runner import states
from npu_runner.runner.base import MemoryProfile
from npu_runner.runner.buckets import bucket_sizes, most_padding
from npu_runner.runner.kv_cache import KVCacheShape, fit_states, plan_kv_cache
from npu_runner.runner.states import StateNeeds, StatePlan, StatePool, StateShape, plan_states
from tests.full_set import only_full
from tests.oracle.running import SMALL, UncompiledGraphs, greedy, runner_of

LAYER = GatedDeltaShape(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)
SHAPE = StateShape(num_layers=24, layer=LAYER, element_bytes=2)
GIB = 1 << 30


def graph_padding(max_num_seqs: int) -> int:
    return most_padding(bucket_sizes(max_num_seqs))


def test_a_state_of_a_9b_model_takes_what_its_shape_says() -> None:
    assert SHAPE.bytes_per_slot == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == 51_511_296


def plan(budget: int | None, max_num_seqs: int, *, is_given: bool, padding_of: Callable[[int], int] = graph_padding,
         max_snapshots: int | None = None, **drafts: Any) -> StatePlan:
    return plan_states(SHAPE, StateNeeds(max_num_seqs=max_num_seqs, is_given=is_given, padding_of=padding_of,
                                         max_snapshots=max_snapshots, **drafts), budget=budget)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("slots", [0, 1, 2, 15, 16, 40, 64, 100, 257, 300, 2000])
def test_a_plan_fits_its_budget_and_has_slots_for_all_padding(slots: int, is_given: bool) -> None:
    made = plan(slots * SHAPE.bytes_per_slot, 64, is_given=is_given)
    assert made.num_slots <= slots
    assert made.num_padding == (graph_padding(made.max_num_seqs) if made.max_num_seqs else 0)
    assert made.num_bytes == made.num_slots * SHAPE.bytes_per_slot
    if is_given:
        assert made.max_num_seqs == (64 if slots >= 64 + graph_padding(64) else 0)
    else:
        assert (made.max_num_seqs > 0) == (slots > 0)
        assert (made.lowered_from == 64) == (0 < made.max_num_seqs < 64)
    assert made.num_snapshots <= made.max_num_seqs


def test_where_few_slots_fit_some_are_left_for_snapshots_unless_all_were_asked_for() -> None:
    few = 40 * SHAPE.bytes_per_slot
    assert plan(few, 256, is_given=False).num_snapshots >= 5
    assert plan(few, 256, is_given=False, max_snapshots=0).num_snapshots == 0
    assert plan(few, 32, is_given=True, padding_of=lambda _: 0).num_snapshots == 8
    assert plan(few, 40, is_given=True, padding_of=lambda _: 0).num_snapshots == 0


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("num", [0, 1, 3, 100])
def test_no_more_snapshots_than_were_asked_for(num: int, is_given: bool) -> None:
    most = plan(40 * SHAPE.bytes_per_slot, 24, is_given=is_given, padding_of=lambda _: 0, max_snapshots=num)
    assert most.max_num_seqs == 24
    assert most.num_snapshots == min(num, 16)
    unmeasured = plan(None, 24, is_given=True, padding_of=lambda _: 0, max_snapshots=num)
    assert unmeasured.num_snapshots == num


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("slots", [0, 4, 5, 16, 64, 67, 68, 100, 257, 300, 2000])
def test_a_plan_has_slots_for_the_drafts_of_a_row_at_least_and_no_more_than_a_step_may_have(slots: int,
                                                                                            is_given: bool) -> None:
    made = plan(slots * SHAPE.bytes_per_slot, 64, is_given=is_given, padding_of=lambda _: 0, drafts_of_row=4,
                drafts_of=lambda num: 4 * num)
    assert made.num_slots <= slots
    assert (made.max_num_seqs > 0) == (slots >= (68 if is_given else 5))
    if made.max_num_seqs:
        assert 4 <= made.num_spares <= 4 * made.max_num_seqs
        assert f", {made.num_spares} for drafts, " in made.describe()[0]
    assert list(made.spares) == list(range(made.max_num_seqs, made.first_snapshot))


def test_drafts_have_what_sequences_leave_but_for_an_eighth_of_snapshots() -> None:
    few = plan(100 * SHAPE.bytes_per_slot, 40, is_given=True, padding_of=lambda _: 0, drafts_of_row=4,
               drafts_of=lambda num: 4 * num)
    assert (few.max_num_seqs, few.num_spares, few.num_snapshots) == (40, 48, 12)
    lowered = plan(100 * SHAPE.bytes_per_slot, 256, is_given=False, padding_of=lambda _: 0, drafts_of_row=4,
                   drafts_of=lambda num: 4 * num)
    assert (lowered.max_num_seqs, lowered.num_spares, lowered.num_snapshots) == (63, 25, 12)
    unmeasured = plan(None, 24, is_given=True, padding_of=lambda _: 0, drafts_of_row=4, drafts_of=lambda num: 4 * num)
    assert (unmeasured.num_spares, unmeasured.num_snapshots) == (21, 6)


def test_unmeasured_memory_takes_what_was_asked_for_and_little_of_what_was_not() -> None:
    assert plan(None, 256, is_given=True).max_num_seqs == 256
    lowered = plan(None, 256, is_given=False)
    assert 0 < lowered.num_bytes <= GIB
    assert "lowered from 256" in lowered.describe()[1]


@pytest.mark.parametrize(("sizes", "most"), [((1, 2, 4, 8, 16, 32), 15), ((4,), 3), ((1,), 0), ((3, 20), 16), ((), 0)])
def test_the_most_rows_that_a_batch_is_padded_with(sizes: tuple[int, ...], most: int) -> None:
    assert most_padding(sizes) == most


def fit(profile: MemoryProfile, **changes: Any) -> StatePlan:
    needs: dict[str, Any] = {"max_num_seqs": 256, "is_given": False, "padding_of": graph_padding,
                             "max_snapshots": None, **changes}
    return fit_states(SHAPE, StateNeeds(**needs), profile, is_measured=True, memory_utilization=0.9,
                      reserved_bytes=GIB)


def test_states_take_at_most_half_and_the_ledger_adds_up() -> None:
    profile = MemoryProfile(total_bytes=48 * GIB, weights_bytes=17 * GIB, activation_peak_bytes=2 * GIB,
                            staging_bytes=GIB)
    left = int(48 * GIB * 0.9) - 20 * GIB - GIB - GIB // 4
    states = fit(profile)
    assert left // 2 - SHAPE.bytes_per_slot < states.num_bytes <= left // 2
    kv = KVCacheShape(num_layers=8, block_size=128, kv_width=1024, element_bytes=2)
    made = plan_kv_cache(kv, profile, is_measured=True, kv_cache_bytes=None, memory_utilization=0.9,
                         reserved_bytes=GIB, max_model_len=65536, max_model_len_is_given=True, max_num_seqs=256,
                         max_num_batched_tokens=8192, states=states)
    assert left - kv.bytes_per_block < made.num_blocks * kv.bytes_per_block + states.num_bytes <= left
    assert "states of sequences" in made.ledger
    assert "images of the next step" in made.ledger
    assert f"{states.max_num_seqs} sequences" in made.ledger
    assert f"lowered from 256 to {states.max_num_seqs}" in made.ledger


def test_graphs_of_long_prefills_have_a_row_of_the_ledger() -> None:
    kv = KVCacheShape(num_layers=8, block_size=128, kv_width=1024, element_bytes=2)
    made = [plan_kv_cache(kv, MemoryProfile(total_bytes=8 * GIB, graph_bytes=graph_bytes), is_measured=True,
                          kv_cache_bytes=None, memory_utilization=0.9, reserved_bytes=0, max_model_len=65536,
                          max_model_len_is_given=True, max_num_seqs=256, max_num_batched_tokens=8192)
            for graph_bytes in (0, GIB // 2)]
    assert made[0].num_blocks - made[1].num_blocks == GIB // 2 // kv.bytes_per_block
    assert "graphs of long prefills" not in made[0].ledger
    assert re.search(r"graphs of long prefills +512.0 MiB", made[1].ledger)


def test_a_max_num_seqs_that_was_asked_for_and_does_not_fit_is_an_error_with_the_ledger() -> None:
    profile = MemoryProfile(total_bytes=32 * GIB, weights_bytes=18 * GIB, activation_peak_bytes=GIB)
    with pytest.raises(OutOfMemoryError, match=r"(?s)256 sequences and 15 padded rows.*lower max_num_seqs to (\d+)"
                                               r".*memory ledger.*weights +18.00 GiB") as caught:
        fit(profile, is_given=True)
    possible = int(str(caught.value).split("lower max_num_seqs to ")[1].split()[0])
    assert fit(profile, is_given=True, max_num_seqs=possible).max_num_seqs == possible
    with pytest.raises(OutOfMemoryError):
        fit(profile, is_given=True, max_num_seqs=possible + 1)
    with pytest.raises(OutOfMemoryError, match="larger devices"):
        fit(MemoryProfile(total_bytes=20 * GIB, weights_bytes=18 * GIB))


# -- serving -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["padded", *only_full("steps that nothing pads; padded ones stay", "eager")])
def watched(request: pytest.FixtureRequest, checkpoint: Any, platform_name: str,
            monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, list[set[int]]]]:
    """An engine with few blocks and few slots whose steps are watched, and the slots that each step changed."""
    path: Path = checkpoint("qwen3_5_text")
    graphs: dict[str, Any] = {}
    if request.param == "padded" and platform_name == "cpu":
        from npu_runner.platforms.cpu.platform import CpuPlatform

        monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: UncompiledGraphs())
        graphs = {"graph_mode": "reduce-overhead", "graph_batch_sizes": (2, 4)}
    # More blocks than one sequence needs, fewer than all: it must preempt.
    with LLM(path, platform=platform_name, max_num_seqs=4, **graphs, max_model_len=256, dtype="float32", block_size=16,
             max_num_batched_tokens=128, kv_cache_bytes=18 * 2 * 16 * 2 * 32 * 4) as llm:
        changed: list[set[int]] = []
        runner: Any = runner_of(llm).steps
        submit = runner.submit

        def watch(batch: ScheduledBatch) -> Any:
            pool = runner.states
            before = pool.states.clone(), pool.conv_states.clone()
            step = submit(batch)
            differs = sum((after != old).flatten(2).any(-1).any(0).int()
                          for after, old in zip((pool.states, pool.conv_states), before, strict=True))
            changed.append(check_slots(batch, {int(slot) for slot in torch.nonzero(differs)}, pool))
            return step

        runner.submit = watch
        yield llm, changed


def check_slots(batch: ScheduledBatch, changed: set[int], pool: StatePool) -> set[int]:
    slots = batch.slots_B.tolist()
    saves = [slot for _, _, slot in batch.state_saves]
    assert len({*slots, *saves}) == len(slots) + len(saves), "two rows share a slot"
    assert all(slot < pool.plan.max_num_seqs for slot in slots)
    assert all(pool.plan.first_snapshot <= slot < pool.plan.num_slots for slot in saves)
    padding = range(pool.plan.max_num_seqs, pool.plan.first_snapshot)
    assert changed <= {*slots, *saves, *padding}, "a step wrote to states of others"
    assert changed >= set(slots), "a row left its state as it was"
    return changed


def test_no_slot_is_shared_or_leaked_over_random_traffic(watched: tuple[LLM, list[set[int]]]) -> None:
    """Arrivals, aborts, several completions of a prompt, prefixes in common, preemptions: each as if it were alone."""
    llm, changed = watched
    rng = random.Random(0)
    beginnings = [rng.choices(range(256), k=length) for length in (70, 130, 5)]
    prompts = {f"r{i}": [*rng.choice(beginnings), *rng.choices(range(256), k=rng.randint(1, 60))] for i in range(12)}
    waiting, aborted, found = list(prompts), set(), {}
    engine = llm.engine
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 3)):
            if waiting:
                name = waiting.pop()
                count = rng.choice([1, 1, 3])
                params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 30), ignore_eos=True, n=count)
                engine.add_request(name, engine.processor.from_text(prompts[name]), params)
        if rng.random() < 0.08:
            aborted.add(name)
            engine.abort_request(name)
        found.update({output.request_id: output for output in engine.step()})
    stats = llm.stats()
    assert stats.num_preemptions > 0, "the test must force preemption"
    assert stats.prefix_cache_hits > 0, "the test must find prefixes"
    assert engine.scheduler._table.num_free_slots == 4, "a slot leaked"
    assert len(changed) > 50
    for name, output in found.items():
        if name not in aborted:
            alone = llm.generate([engine.processor.from_text(prompts[name])],
                                 greedy(len(output.completions[0].token_ids)))
            assert all(each.token_ids == alone[0].token_ids for each in output.completions)


def test_steps_that_are_nobodys_leave_serving_states_alone(watched: tuple[LLM, list[set[int]]]) -> None:
    llm, _ = watched
    prompts = [llm.engine.processor.from_text("which of the pictures " * count) for count in (1, 4)]
    expected = [output.token_ids for output in llm.generate(prompts, greedy())]
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, greedy())
    for _ in range(4):
        llm.engine.step()
    runner = runner_of(llm)
    pool = runner.states
    assert pool is not None
    before = pool.states.clone(), pool.conv_states.clone()
    del runner.steps.submit  # type: ignore[method-assign]
    runner.profile_run()
    runner.dummy_run(64, 3, expected_decode_len=2)
    num_seqs = pool.plan.max_num_seqs
    for after, old in zip((pool.states, pool.conv_states), before, strict=True):
        assert torch.equal(after[:, :num_seqs], old[:, :num_seqs])
    found = []
    while llm.engine.has_unfinished_requests():
        found += llm.engine.step()
    assert [each.completions[0].token_ids for each in sorted(found, key=lambda output: output.request_id)] == expected


def test_a_step_that_failed_over_states_is_not_run_again_over_them(watched: tuple[LLM, list[set[int]]]) -> None:
    """Memory runs out behind the writes of a step: its sequences begin anew, and end as if nothing had been."""
    llm, _ = watched
    prompts = [llm.engine.processor.from_text("which of the pictures " * count) for count in (1, 2, 3)]
    expected = [output.token_ids for output in llm.generate(prompts, greedy())]
    steps: Any = runner_of(llm).steps
    sample = steps.sample
    failures: list[str] = []

    def fail_once(step: Any, logits_BV: torch.Tensor) -> Any:
        if not step.batch.is_prefill and step.batch.batch_size == 3 and not failures:
            failures.append(step.batch.describe())
            raise MemoryError("can't allocate memory")
        return sample(step, logits_BV)

    steps.sample = fail_once
    assert [output.token_ids for output in llm.generate(prompts, greedy())] == expected
    assert failures
    assert runner_of(llm).guard.num_retries == 0


def test_a_max_num_seqs_that_nobody_asked_for_is_lowered_and_serves(checkpoint: Any, platform_name: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    if platform_name != "cpu":
        pytest.skip("elsewhere memory is measured")
    monkeypatch.setattr(states, "UNMEASURED_STATE_BYTES", 10 * 16_896)
    settings = {"platform": platform_name, "dtype": "float32", "max_model_len": 256}
    with LLM(checkpoint("qwen3_5_text"), **settings) as llm:
        assert llm.engine.max_num_seqs == 9
        assert "10 states of 16.5 KiB: 9 sequences, 0 padded rows, 1 snapshots" in llm.engine.ledger
        assert "max_num_seqs lowered from 256 to 9" in llm.engine.ledger
        assert llm.engine.describe()["gated_delta"] == "torch"
        prompts = [llm.engine.processor.from_text(f"{count} images " * 9) for count in range(12)]
        together = [output.token_ids for output in llm.generate(prompts, greedy())]
    with LLM(checkpoint("qwen3_5_text"), max_num_seqs=2, **settings) as llm:
        assert [output.token_ids for output in llm.generate(prompts, greedy())] == together


def test_a_step_too_small_for_a_chunk_is_refused_by_name(checkpoint: Any, platform_name: str) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 63: .* multiples of 64"):
        LLM(checkpoint("qwen3_5_text"), platform=platform_name, **SMALL, max_num_batched_tokens=63)
