"""Drafts from earlier answers against their definition, and what is kept of these."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_runner.core import suffix_drafts
from npu_runner.core.suffix_drafts import SuffixDrafts, SuffixSettings
from npu_runner.errors import ConfigError
from npu_runner.request.speculative import SpeculativeConfig
from tests.full_set import examples

SETTINGS = SuffixSettings(max_tree_depth=24, max_cached_requests=100, max_spec_factor=1.0, min_token_prob=0.1)


def path_by_definition(texts: list[list[int]], end: list[int], least: int, most: int, rules: SuffixSettings, *,
                       is_own: bool = False) -> tuple[list[int], float]:
    """The most frequent tokens, one after the other, behind the longest end that stands in `texts`, newest last. Of its
    own text the end itself is no such place."""
    for size in range(min(rules.max_tree_depth, len(end)), least - 1, -1):
        found = [text[place:] for text in texts for place in range(size, len(text) + 1 - is_own)
                 if text[place - size : place] == end[-size:]]
        if found:
            break
    else:
        return [], 0.0
    found, share, score = found[::-1], 1.0, 0.0
    path: list[int] = []
    while len(path) < min(most, int(rules.max_spec_factor * size)):
        counts = Counter(follows[len(path)] if len(path) < len(follows) else None for follows in found)
        best = max(counts, key=lambda token: counts[token])
        share *= counts[best] / len(found)
        if best is None or share < rules.min_token_prob:
            break
        found = [follows for follows in found if len(follows) > len(path) and follows[len(path)] == best]
        path.append(best)
        score += share
    return path, score


@settings(max_examples=examples(300), deadline=None)
@given(answers=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=6),
       tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12), most=st.integers(1, 6), depth=st.integers(2, 6),
       factor=st.sampled_from([0.5, 1.0, 2.0]), prob=st.sampled_from([0.0, 0.3, 0.6]))
def test_the_more_probable_path_of_the_own_tokens_and_of_answers(answers: list[list[int]], tokens: list[int],
                                                                 most: int, depth: int, factor: float,
                                                                 prob: float) -> None:
    rules = SuffixSettings(max_tree_depth=depth, max_cached_requests=100, max_spec_factor=factor, min_token_prob=prob)
    drafts = SuffixDrafts(rules)
    for answer in answers:
        drafts.add(answer)
    own, own_score = path_by_definition([tokens], tokens, 1, most, rules, is_own=True)
    others, score = path_by_definition([answer for answer in answers if len(answer) > 1], tokens, 2, most, rules)
    found = drafts.propose(np.array(tokens, dtype=np.int32), most)
    assert found in ([own] if own_score > score + 1e-9 else [others] if score > own_score + 1e-9 else [own, others])


def test_an_answer_is_proposed_to_the_next_one_as_far_as_it_was_matched() -> None:
    drafts = SuffixDrafts(SETTINGS)
    drafts.add(list(range(10, 40)))
    assert drafts.propose(np.array([1, 2, 10, 11, 12], dtype=np.int32), 8) == [13, 14, 15]
    assert drafts.propose(np.array([1, 2, 9, 12], dtype=np.int32), 8) == []


def test_the_oldest_answers_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number, and by their tokens: 64 of these here."""
    few = SuffixDrafts(SuffixSettings(max_tree_depth=24, max_cached_requests=2, max_spec_factor=1.0,
                                      min_token_prob=0.1))
    for first in (10, 20, 30):
        few.add([first, first + 1, first + 2])
    assert [few.propose(np.array([first, first + 1], dtype=np.int32), 1) for first in (10, 20, 30)] == [[], [22], [32]]
    monkeypatch.setattr(suffix_drafts, "_CAPACITY", 64)
    small = SuffixDrafts(SETTINGS)
    num_bytes = small.num_bytes
    for first in range(0, 1000, 10):
        small.add(list(range(first, first + 7)))
        assert small.propose(np.array([first, first + 1, first + 2], dtype=np.int32), 9) == [
            first + 3, first + 4, first + 5]
    assert small.propose(np.array([0, 1, 2], dtype=np.int32), 9) == []
    assert small.num_bytes == num_bytes
    small.add(list(range(40)))
    assert small.propose(np.array([0, 1, 2], dtype=np.int32), 9) == [], "longer than half of all"


def test_without_cached_requests_only_the_own_tokens_count() -> None:
    none = SuffixDrafts(SuffixSettings(max_tree_depth=24, max_cached_requests=0, max_spec_factor=1.0,
                                       min_token_prob=0.1))
    none.add([1, 2, 3, 4])
    assert none.num_bytes < 100
    assert none.propose(np.array([1, 2], dtype=np.int32), 4) == []
    assert none.propose(np.array([5, 6, 7, 8, 5, 6], dtype=np.int32), 4) == [7, 8]


def test_settings_have_vllms_names_and_defaults() -> None:
    config = SpeculativeConfig.from_mapping({"method": "suffix"})
    assert config.to_json() == {
        "method": "suffix", "num_speculative_tokens": 24, "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000, "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1}
    assert SpeculativeConfig.from_mapping(config.to_json()) == config
    none = SpeculativeConfig.from_mapping({"method": "suffix", "suffix_decoding_max_cached_requests": 0,
                                           "suffix_decoding_max_tree_depth": 50})
    assert (none.suffix_decoding_max_cached_requests, none.num_speculative_tokens) == (0, 32)


@pytest.mark.parametrize(("given", "words"), [
    ({"suffix_decoding_max_tree_depth": 0}, "max_tree_depth: 0 is no whole number from 1 to 64"),
    ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests: -1 is no whole number from 0"),
    ({"suffix_decoding_max_spec_factor": "1"}, "max_spec_factor: '1' is no number from 0 to 16"),
    ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob: 1.5 is no number from 0 to 1"),
    ({"suffix_decoding_min_token_prob": float("nan")}, "min_token_prob: nan is no number"),
    ({"prompt_lookup_max": 4}, "'prompt_lookup_max': not served with method suffix"),
])  # fmt: skip
def test_values_that_are_none_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculativeConfig.from_mapping({"method": "suffix", **given})
