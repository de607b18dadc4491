"""docs/benchmarks.svg shows the first table of docs/benchmarks.md, whose ratios are those of its figures."""

from __future__ import annotations

import pytest

from bench.chart import DOCS, draw, read_table

PAGE = (DOCS / "benchmarks.md").read_text()


def test_the_chart_is_what_the_program_draws_now() -> None:
    assert (DOCS / "benchmarks.svg").read_text() == draw(read_table(PAGE)), "run python -m bench.chart"


def test_each_ratio_is_that_of_its_figures() -> None:
    figures = [figure for figure in read_table(PAGE) if figure.peer_value is not None]
    assert [f"{figure.ratio:.2f}" for figure in figures] == [figure.stated_ratio for figure in figures]


def test_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        read_table("| workload | unit |\n|---|---|\n| a | ms |\n")
