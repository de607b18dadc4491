"""Drafts against their definitions: what followed the same tokens before, in as many rows and tokens as may be."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.core.batch import ScheduledBatch
from npu_runner.core.block_manager import BlockManager
from npu_runner.core.draft_history import DraftHistory, followers
from npu_runner.core.drafts import Drafter
from npu_runner.core.scheduler import Scheduler, SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.errors import ConfigError
from npu_runner.request.outputs import DraftCounters
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.speculative import SpeculativeConfig
from tests.core.traffic import MAX_LEN, World, next_token
from tests.full_set import examples

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=100, max_image_tokens=10)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 2}


def by_definition(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The longest end that stands earlier too, at the earliest place; written as the sentence is."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + most]
    return []


@settings(max_examples=examples(300), deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30), shortest=st.integers(1, 4),
       more=st.integers(0, 4), most=st.integers(1, 6))
def test_what_is_looked_up_is_what_followed(tokens: list[int], shortest: int, more: int, most: int) -> None:
    found = followers(np.array(tokens, dtype=np.int32), shortest, shortest + more, most)
    assert found == by_definition(tokens, shortest, shortest + more, most)


def test_an_example_of_vllms_tests() -> None:
    assert followers(np.array([1, 2, 3, 4, 1, 2, 3], dtype=np.int32), 2, 2, 3) == [4, 1, 2]


def sequence(tokens: list[int], most: int | None = None) -> Sequence:
    return Sequence(0, 0, "0", 0, PromptInputs(tokens), SamplingParams(), 0, max_num_tokens=most)


def test_forced_tokens_come_first_and_what_followed_them_before_comes_behind() -> None:
    drafter, seq = Drafter(SpeculativeConfig.from_mapping(NGRAM)), sequence([1, 2, 3, 4, 5, 1])
    drafter.record_next([seq], [[2]], [1])
    assert drafter.propose([seq], 100) == [[2, 3, 4]]
    assert drafter.propose([seq], 100) == [[]], "what was forced holds for one step"


def test_what_was_forced_is_no_draft_behind_a_step_without_drafts() -> None:
    """One of so many rows that none has any, or a token of it has come since."""
    off = {"method": "forced", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[2, 8, 0]]}
    drafter, sequences = Drafter(SpeculativeConfig.from_mapping(off)), [sequence([1, 2, 3]) for _ in range(2)]
    drafter.record_next(sequences, [[4, 5]] * 2, [2] * 2)
    assert (drafter.can_draft(sequences), drafter.propose(sequences, 100)) == (False, [])
    sequences[0].append(4)
    assert drafter.propose(sequences[:1], 100) == [[]]
    assert drafter.propose(sequences[1:], 100) == [[4, 5]]


def test_steps_run_ahead_where_no_row_may_have_drafts() -> None:
    """Of too many rows, without a grammar, or while what is looked up is paused: the sequence has 40 tokens then."""
    drafter = Drafter(SpeculativeConfig.from_mapping(NGRAM | {"num_speculative_tokens_per_batch_size": [[2, 8, 0]]}))
    paused, ruled = (sequence([1, 2] * 20) for _ in range(2))
    assert drafter.can_draft([paused])
    assert not drafter.can_draft([paused, ruled])
    paused.drafting = DraftHistory()
    paused.drafting.judge(24, 0, 40)
    assert not drafter.can_draft([paused])
    for _ in range(16):
        paused.append(1)
    assert drafter.can_draft([paused])
    drafter = Drafter(SpeculativeConfig.from_mapping({"method": "forced"}))
    assert not drafter.can_draft([paused, ruled])
    ruled.params = ruled.params.replace(structured_outputs={"regex": "a"})
    assert drafter.can_draft([paused, ruled])


def test_the_drafts_of_a_step_have_bounds() -> None:
    """Those of a row, of a step, and of what the sequence may still have: behind its last token nothing is drawn."""
    drafter = Drafter(SpeculativeConfig.from_mapping({"method": "forced", "num_speculative_tokens": 4}))
    for most, room, wanted in ((None, 100, [4, 4]), (None, 5, [4, 1]), (9, 100, [2, 2]), (7, 100, [0, 0])):
        sequences = [sequence([1] * 6, most) for _ in range(2)]
        drafter.record_next(sequences, [[7] * 9] * 2, [9] * 2)
        assert [len(drafts) for drafts in drafter.propose(sequences, room)] == wanted


def test_drafts_by_the_number_of_rows() -> None:
    config = SpeculativeConfig.from_mapping({"method": "forced", "num_speculative_tokens": 4,
                                             "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 0]]})
    assert [config.most_drafts(rows) for rows in (1, 2, 3, 8, 9)] == [3, 3, 0, 0, 4]
    assert SpeculativeConfig.from_mapping(config.to_json()) == config


def test_a_sequence_that_keeps_few_drafts_is_left_alone_for_longer_and_longer() -> None:
    history, pauses = DraftHistory(_paused_until=8), []
    tokens = [1, 2] * 2000

    def find(tokens_L: np.ndarray) -> list[int]:
        return followers(tokens_L, 1, 3, 4)

    for _ in range(6):
        num = history._paused_until
        pauses.append(num)
        for _ in range(6):
            assert history.lookup(num, lambda start, end: tokens[start:end], behind=[], find=find)
            history.judge(4, 0, num)
        assert not history.lookup(num, lambda start, end: tokens[start:end], behind=[], find=find)
    assert np.diff(pauses).tolist() == [16, 32, 64, 128, 256]
    history.judge(24, 6, 1000)
    history.judge(24, 5, 1000)
    assert history._paused_until == 1016, "a good one ends it"


def test_kept_drafts_are_counted_by_what_proposed_them() -> None:
    """Two forced and two looked up; the first three of them are drawn, then another token."""
    drafter = Drafter(SpeculativeConfig.from_mapping({**NGRAM, "num_speculative_tokens": 4}))
    scheduler = Scheduler(LIMITS, BlockManager(20, 4), drafter)
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 1])
    scheduler.add(seq)
    scheduler.schedule()
    scheduler.complete()[0].append(2)  # type: ignore[union-attr]
    scheduler.resolve_drafts()
    drafter.record_next([seq], [[3, 4]], [2])
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.has_drafts
    assert (batch.token_ids_T.tolist(), batch.context_lens_B.tolist()) == ([2, 3, 4, 5, 6], [13])
    scheduler.complete()
    for token in (3, 4, 5, 9):
        seq.append(token)
    assert scheduler.resolve_drafts() == 3
    assert drafter.counters == DraftCounters(1, 2, 2, 2, 1)
    assert (drafter.counters.num_draft_tokens, drafter.counters.mean_acceptance_length) == (4, 4.0)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.num_expected) == (13, 12, 0)
    assert len(seq.block_table) == 4, "no block is kept for what was not"


def decoding(scheduler: Scheduler, lengths: list[int]) -> list[Sequence]:
    """Sequences whose prompts are computed."""
    sequences = []
    for number, length in enumerate(lengths):
        seq = Sequence(number, number, str(number), 0, PromptInputs([5] * length), SamplingParams(), 0)
        scheduler.add(seq)
        sequences.append(seq)
    assert scheduler.schedule() is not None
    for seq in scheduler.complete():
        assert seq is not None
        seq.append(5)
    scheduler.resolve_drafts()
    return sequences


def drafted(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    assert not batch.is_prefill
    return batch


@pytest.mark.parametrize(("num_blocks", "wanted"), [(9, [4, 4]), (8, [4, 3]), (7, [3, 3])])
def test_drafts_take_no_block_that_a_sequence_may_need(num_blocks: int, wanted: list[int]) -> None:
    """Rows of 5 tokens in two blocks of 4: three drafts fit, a fourth takes a block more. One for each row stays."""
    drafter = Drafter(SpeculativeConfig.from_mapping({"method": "forced", "num_speculative_tokens": 4}))
    blocks = BlockManager(num_blocks, 4, enable_prefix_caching=False)
    scheduler = Scheduler(LIMITS, blocks, drafter)
    sequences = decoding(scheduler, [4, 4])
    drafter.record_next(sequences, [[7, 7, 7, 7]] * 2, [4] * 2)
    assert (drafted(scheduler).query_lens_B - 1).tolist() == wanted
    scheduler.complete()
    for seq in sequences:
        seq.append(1)
    scheduler.resolve_drafts()
    assert [len(seq.block_table) for seq in sequences] == [2, 2]
    assert scheduler.num_preemptions == 0


def test_a_block_of_kept_drafts_is_found_and_one_of_refused_drafts_is_not() -> None:
    drafter = Drafter(SpeculativeConfig.from_mapping({"method": "forced", "num_speculative_tokens": 8}))
    blocks = BlockManager(40, 4)
    scheduler = Scheduler(LIMITS, blocks, drafter)
    [seq] = decoding(scheduler, [4])
    drafter.record_next([seq], [[6, 6, 6, 7, 7, 7, 7, 7]], [8])
    assert drafted(scheduler).context_lens_B.tolist() == [13]
    scheduler.complete()
    for token in (6, 6, 6, 1):
        seq.append(token)
    scheduler.resolve_drafts()
    scheduler.finish(seq, "stop")
    for tokens, wanted in (([5] * 5 + [6] * 3, 8), ([5] * 5 + [6] * 3 + [7] * 4, 8), ([5] * 5 + [7] * 4, 4)):
        again = sequence([*tokens, 9])
        blocks.match_prefix(again)
        assert again.num_cached_tokens == wanted
        blocks.free(again)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 16]), window=st.sampled_from([None, 1, 5]),
       drafts=st.integers(1, 6), spare=st.integers(0, 20))
def test_random_traffic_ends_with_the_tokens_of_one_at_a_time(seed: int, block_size: int, window: int | None,
                                                              drafts: int, spare: int) -> None:
    limits = SchedulerLimits(max_num_seqs=5, max_num_batched_tokens=12, max_image_tokens=7)
    world = World(random.Random(seed), block_size, 2 * (-(-MAX_LEN // block_size)) + 6 + spare, limits, True,
                  window=window, drafts=drafts)
    sequences = [world.add_prompt(PromptInputs([0] * world.rng.randint(1, 30))) for _ in range(8)]
    world.run(restarts=True)
    for seq in sequences:
        tokens = list(seq.prompt.token_ids)
        while len(tokens) < seq.num_known_tokens:
            tokens.append(next_token(tokens))
        assert seq.tokens(0, seq.num_known_tokens) == tokens


@pytest.mark.parametrize(("given", "words"), [
    ("ngram", "is no object like"), ({}, "method: None is none; ngram, suffix, mtp and forced are served"),
    ({"method": "mtp"}, "speculative_config.num_speculative_tokens: say how many, 1 to 3"),
    ({"method": "mtp", "num_speculative_tokens": 4}, "num_speculative_tokens: 4 is no whole number from 1 to 3"),
    ({"method": "mtp", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, "'prompt_lookup_max': not served"),
    ({"method": "eagle3"}, "there is no draft model here"),
    ({"method": "ngram"}, "num_speculative_tokens: say how many, 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "0 is no whole number from 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": True}, "True is no whole number"),
    ({**NGRAM, "prompt_lookup_min": 3}, "prompt_lookup_min 3 is more than prompt_lookup_max 2"),
    ({**NGRAM, "model": "other"}, "speculative_config.'model': not served with method ngram"),
    ({"method": "forced", "prompt_lookup_max": 2}, "'prompt_lookup_max': not served with method forced"),
    ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 2, 9]]}, "is no list like"),
    ({**NGRAM, "num_speculative_tokens_per_batch_size": [[3, 4, 1], [1, 2, 1]]}, "sizes rise"),
])  # fmt: skip
def test_what_is_not_served_is_refused_by_name(given: object, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SpeculativeConfig.from_mapping(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(("given", "bounds"), [
    ({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2)),
    ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
])
def test_bounds_of_look_ups_are_as_in_vllm(given: dict[str, int], bounds: tuple[int, int]) -> None:
    found = SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 1, **given})
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == bounds
