"""README's table of models says what the strategies are and what the tests run, and CONTRIBUTING names what exists."""

from __future__ import annotations

import pydoc
import re
from pathlib import Path
from typing import Any

import pytest

from npu_runner import strategies
from npu_runner.checkpoint.model_config import GatedDeltaNetConfig
from npu_runner.prompts.text import tool_parsers
from npu_runner.strategies import LoadStrategy, pick_strategy
from tests.npu import test_expert_families as npu_experts
from tests.npu import test_hybrid_families as npu_hybrids
from tests.npu import test_tokens_equal_cpu as npu
from tests.oracle import test_tensor_parallel as ranks

ROOT = Path(__file__).parents[2]
OWN: dict[str, type[LoadStrategy]] = {name: kind for kind in strategies._OWN for name in kind.model_types}


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


@pytest.mark.parametrize("model_type", CELLS)
def test_the_table_says_what_the_strategy_is_and_what_the_tests_run(model_type: str, checkpoint: Any) -> None:
    cells = CELLS[model_type]
    path: Path = checkpoint(model_type)
    strategy = pick_strategy(path)
    has_state = any(isinstance(layer.mixer, GatedDeltaNetConfig) for layer in strategy.read_config().layers)
    assert cells["pictures"] == _yes(strategy.is_multimodal)
    assert cells["prefix cache"] == ("snapshots" if has_state else "blocks")
    assert cells["ranks"] == _yes(model_type in ranks.CASES)
    graphs = set() if cells["decode graphs"] == "no" else set(cells["decode graphs"].split(", "))
    assert graphs <= {"npu", "cuda", "cpu"}
    assert ("npu" in graphs) == (model_type in (*npu.TINY, *npu_experts.FAMILIES, *npu_hybrids.FAMILIES))


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
