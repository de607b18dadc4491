"""docs/benchmarks.svg shows the first table of docs/benchmarks.md, read here a second time by other means."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.draw_benchmarks import draw, read_table

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "benchmarks.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"


def stated_ratios() -> dict[str, float]:
    """Workload and its cell "times as fast", of rows that have one."""
    first = PAGE[PAGE.index("\n|") + 1:].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in first.splitlines()[2:]]
    return {cells[0]: float(cells[5]) for cells in rows if cells[5]}


def test_the_chart_has_a_bar_for_each_row_with_a_peer_as_long_as_the_table_says() -> None:
    root = ElementTree.parse(DOCS / "benchmarks.svg").getroot()
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if bar.get("class") == "bar"]
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "end"]
    stated = stated_ratios()
    assert labels == list(stated)
    scale = max(widths) / max(stated.values())
    assert widths == pytest.approx([ratio * scale for ratio in stated.values()], rel=0.01)


def test_the_chart_is_what_the_script_draws_now() -> None:
    assert (DOCS / "benchmarks.svg").read_text() == draw(read_table(PAGE)), "run python scripts/draw_benchmarks.py"


def test_each_ratio_is_that_of_its_figures() -> None:
    figures = [figure for figure in read_table(PAGE) if figure.peer_value is not None]
    assert [f"{figure.ratio:.2f}" for figure in figures] == [figure.stated_ratio for figure in figures]


def test_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        read_table("| workload | unit |\n|---|---|\n| a | ms |\n")
