"""A family that only transformers knows needs a release that serves it; the one that is installed is not imported.

Runs where transformers is too old, too: its release is read from its metadata. Knows nothing of what is served.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from npu_runner.errors import ModelError
from npu_runner.strategies import pick_strategy, transformers_model

ROOT = Path(__file__).parents[2]
WHAT = r"'gemma' is not supported.*of transformers 5.20 or newer \(pip install 'transformers>=5\.20,<6'\)"


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma"}))
    return tmp_path


@pytest.mark.parametrize("installed", ["4.57.1", "5.5.4", "5.19.9"])
def test_an_old_one_is_refused_by_name(installed: str, gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "version", lambda name: installed)
    with pytest.raises(ModelError, match=rf"{WHAT}; {re.escape(installed)} is installed\."):
        pick_strategy(gemma)


def test_without_one_the_error_says_what_to_install(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise transformers_model.PackageNotFoundError(name)

    monkeypatch.setattr(transformers_model, "version", missing)
    with pytest.raises(ModelError, match=rf"{WHAT}\. A package"):
        pick_strategy(gemma)


@pytest.mark.parametrize(("installed", "serves"), [
    ("5.20.0", True), ("5.20.0.dev0", True), ("5.100.1", True), ("6.0.0", True), ("5.3.0", False), ("", False),
])  # fmt: skip
def test_releases_are_compared_as_numbers(installed: str, serves: bool) -> None:
    assert transformers_model.is_new_enough(installed) == serves


def test_the_extra_asks_for_the_same() -> None:
    (found,) = re.findall(r'^transformers = \["([^"]+)"\]', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    specifier = Requirement(found).specifier
    assert "5.20.0" in specifier
    assert "5.19.9" not in specifier
