"""Pages in two languages agree in what no language changes: code, headings, links, and the numbers in tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TWINS = [path for path in (*ROOT.glob("*.zh.md"), *(ROOT / "docs").glob("*.zh.md"))]


def english(path: Path) -> Path:
    return path.with_name(path.name.replace(".zh.md", ".md"))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def code(path: Path) -> list[str]:
    """The lines of code blocks without their comments, which are in the page's language."""
    return [re.sub(r"\s+# .*", "", line) for line in lines_of(path) if line.startswith("    ") and line.strip()]


def table_rows(path: Path) -> list[tuple[int, list[str], list[str]]]:
    """For each row: how many cells, the code in it, the numbers in it."""
    rows = []
    for line in lines_of(path):
        if line.startswith("|"):
            words = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", line))
            numbers = re.findall(r"\d[\d.,]*\d|\d", words)
            rows.append((line.count("|"), sorted(re.findall(r"`[^`]*`", line)), sorted(numbers)))
    return rows


def headings(path: Path) -> list[int]:
    return [len(line.split(" ")[0]) for line in lines_of(path) if line.startswith("#")]


def links(path: Path) -> list[str]:
    """Targets, each page's own language aside; the same page may be named once more or less in a sentence."""
    found = set(re.findall(r"\]\(([^)]+)\)", path.read_text()))
    return sorted({target.replace(".zh.md", ".md") for target in found} - {path.name, english(path).name})


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_a_page_and_its_twin_say_the_same(path: Path) -> None:
    twin = english(path)
    assert code(path) == code(twin)
    assert table_rows(path) == table_rows(twin)
    assert headings(path) == headings(twin)
    assert links(path) == links(twin)
    assert f"({path.name})" in twin.read_text(), "each leads to the other"
    assert f"({twin.name})" in path.read_text()


def test_the_pages_are_there() -> None:
    assert {"README.zh.md", "running-on-ascend.zh.md"} <= {path.name for path in TWINS}
