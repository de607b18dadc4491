"""Stop strings against the definition, text grown letter by letter; and the work that many of them make."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npu_runner.engine.detokenizer import IncrementalDetokenizer, StopSearch

LETTERS = st.text("ab", min_size=1, max_size=6)


def completed_by(text: str, num_old: int, stops: list[str]) -> tuple[int, str] | None:
    """By the definition: grow the text behind the first `num_old` letters until one of the stops is its end."""
    for end in range(num_old + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


def begun_by(text: str, stops: list[str]) -> int:
    sizes = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
    return max(sizes)


@given(
    stops=st.lists(LETTERS, min_size=1, max_size=6),
    pieces=st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=8),
)
def test_the_first_completed_stop_is_found_and_the_longest_begun_held_back(stops, pieces):
    search, text = StopSearch(stops), ""
    for fresh, is_allowed in pieces:
        found = search.feed(fresh, is_allowed=is_allowed)
        text += fresh
        assert found == (completed_by(text, len(text) - len(fresh), stops) if is_allowed else None)
        if found is not None:
            return
        assert search.num_started(at_mark=False) == begun_by(text, stops)


@given(stops=st.lists(LETTERS, min_size=1, max_size=4), kept=LETTERS, dropped=LETTERS, then=LETTERS)
def test_text_taken_back_leaves_no_trace(stops, kept, dropped, then):
    search, undisturbed = StopSearch(stops), StopSearch(stops)
    for each in (search, undisturbed):
        each.feed(kept, is_allowed=False)
    search.mark()
    search.feed(dropped, is_allowed=False)
    assert search.num_started(at_mark=True) == begun_by(kept, stops)
    search.retract()
    assert search.feed(then, is_allowed=True) == undisturbed.feed(then, is_allowed=True)
    assert search.num_started(at_mark=False) == undisturbed.num_started(at_mark=False)


def letters_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["z" * 200, "xy" * 100, "stop at" * 30])
def test_work_for_a_token_does_not_grow_with_the_number_of_stops(text):
    """Calls of functions, Python's and C's, while 200 tokens come."""
    tokenizer = letters_tokenizer()
    ids = tokenizer.encode(text).ids[:200]

    def num_calls(stops: list[str]) -> int:
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
        count = 0

        def count_call(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            for token_id in ids:
                assert detokenizer.append([token_id]) is None
        finally:
            sys.setprofile(None)
        return count

    many = [f"stop at {n}{'x' * 1000}" for n in range(64)]
    num_calls(many[:1])  # the tokenizer's own tables are made on the way
    assert num_calls(many) < 1.5 * num_calls(many[:1])
