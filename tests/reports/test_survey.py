"""Which rows a report shows: some of each kind, at even distances. And how fields of answers are counted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.reports.cards import FAILED, TITLES
from npu_runner.reports.page import share
from npu_runner.reports.survey import FieldCounts, Kind, Survey, evenly, spread

CODES = st.sampled_from(["a", "b", "c", "d"])
KINDS = st.one_of(st.builds(Kind, st.just(FAILED), CODES),
                  st.builds(Kind, st.sampled_from(list(TITLES)[1:]), st.just("")))  # fmt: skip
SIZES = st.dictionaries(KINDS, st.integers(1, 900), max_size=8)


def surveyed(sizes: dict[Kind, int], seed: int = 0) -> Survey:
    found = Survey()
    found.kinds.update(sizes)
    rows = [kind for kind, size in sizes.items() for _ in range(size)]
    found.kind_of_row = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    return found


@given(SIZES, st.integers(1, 400))
def test_a_page_shows_rows_of_each_kind_and_is_as_full_as_it_can_be(sizes: dict[Kind, int], most: int) -> None:
    found = surveyed(sizes)
    shown = spread(found, most)
    places = [int(place) for numbers in shown.values() for place in numbers]
    assert len(places) == len(set(places)) == min(most, sum(sizes.values())), "each row once"
    for kind, numbers in shown.items():
        assert all(found.kind_of_row[place] == kind for place in numbers)
        assert list(numbers) == sorted(numbers)
        assert len(numbers) == sizes[kind] or len(numbers) >= most // len(sizes), "no kind crowds another one out"
    names = [list(TITLES).index(kind.name) for kind in shown]
    assert names == sorted(names), "the worst first"
    codes = [sizes[kind] for kind in shown if kind.code]
    assert codes == sorted(codes, reverse=True)


def test_the_rows_of_a_kind_are_taken_from_all_of_the_job() -> None:
    good = Kind("answered")
    assert spread(surveyed({good: 1000}), 4)[good].tolist() == [0, 250, 500, 750]


@given(st.lists(st.integers(0, 50), max_size=9), st.integers(0, 300))
def test_what_is_shared_out_evenly_differs_only_where_there_is_no_more(sizes: list[int], most: int) -> None:
    given = evenly(sizes, most)
    assert sum(given) == min(most, sum(sizes))
    for size, number in zip(sizes, given, strict=True):
        assert number == size or number >= max(given) - 1


def described(values: Sequence[object]) -> str:
    counts = FieldCounts()
    for value in values:
        counts.add(value)
    return counts.describe()


def test_a_field_is_described_by_its_values_or_its_bounds() -> None:
    assert described(["circle", "square", "circle", ""]) == "circle 2; square 1; (empty) 1"
    assert described([["x", "y"], ["x"], []]) == "x 2; y 1"
    assert described([True, None, {"a": 1}]) == "true 1; null 1; others"
    assert described([number / 4 for number in range(300)]) == "0 to 74.75, mean 37.38"
    assert described([f"text {number}" for number in range(300)]) == "many different values"
    assert described(["x" * 10_000]) == "many different values"
    assert described([*["yes"] * 200, *map(str, range(20))]).startswith("yes 200; ")


def test_a_field_of_anything_at_all_is_counted() -> None:
    values = [float("nan"), float("inf"), 10**400, -(10**400), True, None, [], {}, [[1]], "", "x" * 10_000, "\ud800"]
    assert described(values)
    assert described(list(json.loads('{"a": 1, "b": 1.5, "c": "x", "e": [1, "x", null], "f": {"g": 1}}').values()))


def test_all_and_nothing_are_said_of_nothing_else() -> None:
    assert [share(part, 2000) for part in (0, 1, 1000, 1999, 2000)] == ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %"]
