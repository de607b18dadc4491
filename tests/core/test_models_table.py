"""A family is one file in strategies/ and one entry in tests/families.py. docs/models.md, README's short table and what
`npu-runner models` prints say what both are. CONTRIBUTING names what exists."""

from __future__ import annotations

import ast
import itertools
import json
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest

from npu_runner import strategies
from npu_runner.cli.main import main
from npu_runner.cli.models import OTHERS, as_line, explain
from npu_runner.prompts.text import tool_parsers
from npu_runner.strategies import find_strategy, strategies_by_model_type
from tests.families import FAMILIES

ROOT = Path(__file__).parents[2]
OWN = {name: kind for name, kind in strategies_by_model_type().items() if kind.__module__.startswith("npu_runner.")}
GENERIC = set(re.findall(r"`([\w.-]+)`", re.search(r"These (\d+) are equal:(.*?)\n\n", (
    ROOT / "docs" / "generic.md").read_text(), re.DOTALL)[2]))  # type: ignore[index]


PAGE, README = ROOT / "docs" / "models.md", ROOT / "README.md"
FACTS = ("images", "videos", "ranks", "prefix cache", "decode graphs")


def table(page: Path, column: str) -> list[tuple[list[str], dict[str, str]]]:
    """(model types, cell by column) of each row of the table of models that has this column."""
    lines = page.read_text().splitlines()
    start = next(number for number, line in enumerate(lines)
                 if line.startswith("|") and {"model_type", column} <= set(_cells(line)))
    head, _, *rows = [_cells(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:])]
    return [(re.findall(r"`([a-z0-9_]+)`", row[head.index("model_type")]), dict(zip(head, row, strict=True)))
            for row in rows]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


ROWS = table(PAGE, "decode graphs")
CELLS = {name: cells for names, cells in ROWS for name in names}
NOT_SERVED = table(PAGE, "why")
SHORT = {name: cells for names, cells in table(README, "videos") for name in names}


def test_every_family_is_in_the_table_once_and_no_other() -> None:
    found = [name for names, _ in ROWS for name in names]
    assert sorted(set(OWN) - set(found)) == [], "not in the table of docs/models.md"
    assert sorted(found) == sorted(OWN)


def test_readmes_short_table_says_the_same_and_names_all_that_see_images() -> None:
    assert {name: (cells["images"], cells["videos"]) for name, cells in SHORT.items()} == {
        name: (CELLS[name]["images"], CELLS[name]["videos"]) for name in SHORT}
    assert {name for name, family in FAMILIES.items() if family.vision is not None} <= set(SHORT)


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    head, *rows, _ = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    printed = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    others = next(cells for names, cells in ROWS if not names)
    page = CELLS | {OTHERS: others}
    assert {name: [cells[fact] for fact in FACTS] for name, cells in printed.items()} == {
        name: [cells[fact] for fact in FACTS] for name, cells in page.items()}


def test_the_command_prints_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["model_type"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {*FAMILIES, OTHERS}
    for name, family in FAMILIES.items():
        assert rows[name]["images"] == (family.vision is not None)
        assert rows[name]["prefix_cache"] == ("snapshots" if family.has_states else "blocks")
        assert rows[name]["strategy"] == f"{OWN[name].__module__}.{OWN[name].__qualname__}"


def test_names_that_are_not_served_have_no_strategy() -> None:
    found = {name: cells["why"].startswith("ranking") for names, cells in NOT_SERVED for name in names}
    assert len(found) > 7
    assert {name for name in found if find_strategy(name)} == {name for name, is_of_ours in found.items() if is_of_ours}


@pytest.mark.full("imports transformers' classes of each")
def test_names_that_are_not_served_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for name in {name for names, _ in NOT_SERVED for name in names} - set(OWN):
        file.write_text(json.dumps({"model_type": name}))
        refused = explain({"model": str(file)})
        assert not refused["served"]
        assert re.search("no AutoModelForCausalLM|more than a text model|is not supported", refused["reason"])


def test_every_family_has_an_entry_from_which_its_tests_are_derived() -> None:
    assert sorted(OWN) == sorted(FAMILIES)
    assert not GENERIC & set(OWN), "docs/generic.md names what has a strategy of its own"


@pytest.mark.parametrize("model_type", OWN)
def test_a_family_is_found_by_its_name(model_type: str) -> None:
    assert find_strategy(model_type) is OWN[model_type], "its file has its name, or what stands before a _ in it"


def test_no_family_is_imported_before_it_is_asked_for() -> None:
    top = ast.parse((ROOT / "strategies" / "__init__.py").read_text()).body
    modules = {node.module for node in top if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name and "strategies" in name} == {"npu_runner.strategies.base"}


@pytest.mark.parametrize("model_type", CELLS)
def test_the_table_says_what_the_strategy_is_and_what_the_tests_run(model_type: str, checkpoint: Any) -> None:
    cells, family = CELLS[model_type], FAMILIES[model_type]
    path: Path = checkpoint(model_type)
    assert cells["images"] == _yes(family.vision is not None)
    assert cells["prefix cache"] == ("snapshots" if family.has_states else "blocks")
    # Both are run with every entry of tests/families.py.
    assert cells["ranks"] == "yes"
    assert "npu" in cells["decode graphs"].split(", ")
    found = explain({"model": str(path)})
    assert found["prefix_cache"] == cells["prefix cache"], "as the layers that are read from its config.json"
    kinds = {("no", "no"): "text", ("yes", "no"): "text and images", ("yes", "yes"): "text, images and videos"}[
        cells["images"], cells["videos"]]
    name = f"{OWN[model_type].__module__}.{OWN[model_type].__qualname__}"
    assert as_line(found) == f"{path}: served as {model_type}, by {name}: {kinds} in, text out"


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
