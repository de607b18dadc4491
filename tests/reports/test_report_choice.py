"""Which rows a report shows: some of each kind, each once, one prompt together. And how fields are spread."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.reports.choice import Group, Section, choose, cut, evenly, places_of, shares
from npu_runner.reports.fields import FieldTable, Sample
from npu_runner.reports.head import field_views, share, tone
from npu_runner.reports.reading import ANSWERED, EXPECTED, FAILED
from npu_runner.reports.survey import ORDER, Candidate, Kind, Survey
from npu_runner.reports.vectors import neighbours, outline

CODES = st.sampled_from(["a", "b", "c", "d"])
KINDS = st.one_of(st.builds(Kind, st.just(FAILED), CODES), st.builds(Kind, st.sampled_from(ORDER[1:])))
SIZES = st.dictionaries(KINDS, st.integers(1, 900), max_size=8)


@given(SIZES, st.integers(1, 400))
def test_a_page_is_as_full_as_it_can_be_and_has_good_rows(sizes: dict[Kind, int], most: int) -> None:
    given = shares(sizes, most)
    assert sum(given.values()) == min(most, sum(sizes.values()))
    assert all(0 <= given[kind] <= size for kind, size in sizes.items())
    good = [kind for kind in sizes if kind.outcome in (EXPECTED, ANSWERED)]
    if good and most > 1:
        assert sum(given[kind] for kind in good) >= min(sum(sizes[kind] for kind in good), max(1, int(0.3 * most)))
    codes = [kind for kind in sizes if kind.outcome == FAILED]
    if codes and most >= 10 * len(sizes):
        assert all(given[kind] for kind in codes), "some of each code"


@given(st.lists(st.integers(0, 50), max_size=9), st.integers(0, 300))
def test_what_is_shared_out_evenly_differs_only_where_there_is_no_more(sizes: list[int], most: int) -> None:
    given = evenly(sizes, most)
    assert sum(given) == min(most, sum(sizes))
    for size, number in zip(sizes, given, strict=True):
        assert number == size or number >= max(given) - 1


@given(SIZES, st.integers(1, 60), st.integers(1, 25), st.integers(1, 4))
def test_pages_hold_each_chosen_row_once(sizes: dict[Kind, int], most: int, per_leaf: int, num_prompts: int) -> None:
    found, place = Survey(), 0
    for kind, size in sizes.items():
        found.kinds[kind] = size
        places = range(place, place + min(size, most))
        found.candidates[kind] = [Candidate(here, (7, here % num_prompts), 0, 1) for here in places]
        place += size
    choice = choose(found, most, 8)
    leaves = cut(choice.sections, per_leaf)
    shown = [place for leaf in leaves for place in places_of(leaf)]
    assert len(shown) == len(set(shown)) == choice.num_rows == choice.num_media == min(most, sum(sizes.values()))
    assert all(len(places_of(leaf)) == per_leaf for leaf in leaves[:-1])
    assert [part.section.kind for leaf in leaves for part in leaf if not part.is_continued] == \
        [section.kind for section in choice.sections]
    if len(shown) > 1:
        assert 7 in choice.common_turns


def test_rows_with_one_prompt_stand_together_and_single_ones_last() -> None:
    found = Survey()
    kind = Kind(ANSWERED)
    found.kinds[kind] = 6
    found.candidates[kind] = [Candidate(place, (prompt,), 0, 0) for place, prompt in enumerate([1, 2, 3, 2, 3, 3])]
    (section,) = choose(found, 10, 8).sections
    assert section == Section(kind, 6, (Group((2, 4, 5), True), Group((1, 3), True), Group((0,), False)))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400))
def test_bounds_and_mean_of_a_sample_are_those_of_all(values: list[float]) -> None:
    sample = Sample()
    for value in values:
        sample.add(value)
    assert (sample.lowest, sample.highest, sum(sample.bins())) == (min(values), max(values), len(values))
    assert sample.mean == pytest.approx(statistics.fmean(values), abs=1e-3)


def test_a_sample_of_many_stays_small_and_has_their_spread() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    sample = Sample()
    for value in values:
        sample.add(float(value))
    assert 4000 < len(sample.values) <= 8192
    counts, _ = np.histogram(values, bins=16)
    assert np.abs(np.array(sample.bins()) / len(sample.values) - counts / len(values)).max() < 0.02


def test_the_spread_of_each_field_is_counted_over_all_answers() -> None:
    table = FieldTable()
    for number in range(300):
        table.add({
            "shape": "circle" if number % 3 else "square", "score": number / 4, "tags": ["x", "y"][: number % 3],
            "text": f"text {number}", "is": number < 75, **({"rare": None} if number == 7 else {}),
            "object": {"a": number},
        })  # fmt: skip
    views = {view.name: view for view in field_views(table)}
    bars = {name: {bar.label: bar.num for bar in view.bars} for name, view in views.items()}
    assert bars["shape"] == {"circle": 200, "square": 100}
    assert bars["tags"] == {"x": 200, "y": 100}
    assert bars["is"] == {"true": 75, "false": 225}
    assert bars["rare"] == {"null": 1}
    assert views["rare"].facts == ["in 0.3 %"]
    assert views["score"].bounds == ("0", "74.75")
    assert views["score"].facts == ["mean 37.38"]
    assert len(views["score"].columns) == 16
    assert views["text"].facts == ["texts of 6 to 8 characters"]
    assert views["object"].facts == ["objects of 1 fields"]


def test_a_field_of_anything_at_all_is_counted() -> None:
    values = [float("nan"), float("inf"), 10**400, -(10**400), True, None, [], {}, [[1]], "", "x" * 10_000, "\ud800"]
    table = FieldTable()
    for value in values:
        table.add({"field": value})
    for number in range(100):
        table.add({f"name {number}": number})
    assert len(field_views(table)) == 60
    assert table.num_more_fields == 41


def test_all_and_nothing_are_said_of_nothing_else() -> None:
    assert [share(part, 2000) for part in (0, 1, 1000, 1999, 2000)] == ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %"]
    assert [tone(part, 2000) for part in (0, 1, 1999, 2000)] == ["bad", "", "", "good"]


def test_the_nearest_vectors_are_those_of_a_float64_product() -> None:
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=16 if number % 4 else 8).astype(np.float32) for number in range(600)]
    vectors[5][:] = 0
    found = neighbours(vectors)
    for number in (0, 1, 2, 333, 599):
        mine = vectors[number].astype(np.float64)
        others = {other: float(vector @ mine / np.linalg.norm(vector) / np.linalg.norm(mine))
                  for other, vector in enumerate(vectors) if other not in (number, 5) and len(vector) == len(mine)}
        best = Counter(others).most_common(3)
        assert [near.number for near in found[number]] == [other for other, _ in best]
        assert [near.similarity for near in found[number]] == pytest.approx([value for _, value in best], abs=1e-5)
    assert neighbours([np.ones(3, np.float32)]) == [[]]


def test_an_outline_goes_up_and_down_as_its_numbers_do() -> None:
    assert outline(np.array([1.0, -0.5, 0.0], np.float32)) == "M0 8v-8M1 8v4"
    assert outline(np.zeros(4, np.float32)) == outline(np.zeros(0, np.float32)) == ""
    assert outline(np.array([np.nan, 1], np.float32)) == ""
    assert outline(np.sin(np.arange(4096)).astype(np.float32)).count("M") <= 48


def test_the_table_takes_what_json_gives() -> None:
    table = FieldTable()
    for _ in range(2):
        table.add(json.loads('{"a": 1, "b": 1.5, "c": "x", "d": null, "e": [1, "x", null], "f": {"g": 1}}'))
    assert [view.name for view in field_views(table)] == list("abcdef")
