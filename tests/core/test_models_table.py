"""A family is one file in strategies/ and one entry in tests/families.py: README's table of models says what both are.
CONTRIBUTING names what exists."""

from __future__ import annotations

import ast
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest

from npu_runner import strategies
from npu_runner.checkpoint.model_config import GatedDeltaNetConfig
from npu_runner.prompts.text import tool_parsers
from npu_runner.strategies import pick_strategy, strategies_by_model_type, strategy_of
from tests.families import FAMILIES

ROOT = Path(__file__).parents[2]
OWN = {name: kind for name, kind in strategies_by_model_type().items() if kind.__module__.startswith("npu_runner.")}
GENERIC = set(re.findall(r"`([\w.-]+)`", re.search(r"Equal are these (\d+):(.*?)\nLarger", (
    ROOT / "docs" / "generic.md").read_text(), re.DOTALL)[2]))  # type: ignore[index]


def table() -> list[tuple[list[str], dict[str, str]]]:
    """(model types, cell by column) of each row."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| model_type "))
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _block(lines[start:])]
    return [(re.findall(r"`([a-z0-9_]+)`", cells[0]), dict(zip(head, cells, strict=True))) for cells in rows]


def _block(lines: list[str]) -> list[str]:
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]


CELLS = {name: cells for names, cells in table() for name in names}


def test_every_family_is_in_the_table_once_and_no_other() -> None:
    found = [name for names, _ in table() for name in names]
    assert sorted(set(OWN) - set(found)) == [], "not in README's table of models"
    assert sorted(found) == sorted(OWN)


def test_every_family_has_an_entry_from_which_its_tests_are_derived() -> None:
    assert sorted(OWN) == sorted(FAMILIES)
    assert not GENERIC & set(OWN), "docs/generic.md names what has a strategy of its own"


@pytest.mark.parametrize("model_type", OWN)
def test_a_family_is_found_by_its_name(model_type: str) -> None:
    assert strategy_of(model_type) is OWN[model_type], "its file is named like it, or like what stands before a _ in it"


def test_no_family_is_imported_before_it_is_asked_for() -> None:
    top = ast.parse((ROOT / "strategies" / "__init__.py").read_text()).body
    modules = {node.module for node in top if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name and "strategies" in name} == {"npu_runner.strategies.base"}


@pytest.mark.parametrize("model_type", CELLS)
def test_the_table_says_what_the_strategy_is_and_what_the_tests_run(model_type: str, checkpoint: Any) -> None:
    cells = CELLS[model_type]
    path: Path = checkpoint(model_type)
    strategy = pick_strategy(path)
    has_state = any(isinstance(layer.mixer, GatedDeltaNetConfig) for layer in strategy.read_config().layers)
    assert cells["images"] == _yes(strategy.is_multimodal)
    assert cells["prefix cache"] == ("snapshots" if has_state else "blocks")
    # Both are run with every entry of tests/families.py.
    assert cells["ranks"] == "yes"
    assert "npu" in cells["decode graphs"].split(", ")
    assert set(cells["decode graphs"].split(", ")) <= {"npu", "cuda", "cpu"}


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def test_contributing_names_what_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./-]+(?:\.(?:py|sh|md|json)|/))`", text)
    no_files = re.sub(r"[\w./]+\.(?:py|sh)", "", text)
    dotted = re.findall(r"\bnpu_runner(?:\.[A-Za-z_]\w*)+", no_files)
    assert len(named) > 10
    assert {"npu_runner.strategies.LoadStrategy", "npu_runner.layers.weights_loader.load_weights"} <= set(dotted)
    groups = {strategies.ENTRY_POINT_GROUP, tool_parsers.ENTRY_POINTS}
    assert groups <= set(dotted)
    assert [name for name in dotted if name not in groups and pydoc.locate(name) is None] == []
    bases = (ROOT, ROOT / "npu_runner", ROOT / "tests" / "oracle")
    assert [name for name in named if not any((base / name).exists() for base in bases)] == []
