"""The lists of packages agree: ranges in pyproject.toml, pins of CI and of the oldest, an Ascend image's needs.

Knows nothing of what the packages do; scripts/test_environments.sh runs the oldest.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
# Of these, `lowest` has what an image brings (torch), and what it may bring and nobody imports.
OTHERS = {"torch", "transformers"}


def ranges(part: str) -> dict[str, Requirement]:
    """Of a list in pyproject.toml."""
    found = re.search(rf"^{part} = (\[.*?\]$)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, part
    return named(ast.literal_eval(found[1]))


def listed(file: str) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return named([line for line in lines if line and not line.startswith("-")])


def named(lines: list[str]) -> dict[str, Requirement]:
    return {each.name.replace("-", "_").lower(): each for each in map(Requirement, lines)}


def test_the_oldest_packages_are_the_lower_ends_of_the_ranges() -> None:
    lowest = listed("requirements-lowest.txt")
    extras = {name: asked for part in ("heif", "tables", "video", "zstd") for name, asked in ranges(part).items()}
    for name, asked in {**ranges("dependencies"), **extras}.items():
        (pinned,) = lowest[name].specifier
        (bound,) = (each.version for each in asked.specifier if each.operator == ">=")
        if name not in OTHERS:
            assert Version(pinned.version) == Version(bound), f"{name}: {asked.specifier}, tested with {pinned}"


def test_what_ci_pins_is_within_the_ranges() -> None:
    pinned = listed("requirements.txt")
    for name, asked in ranges("dependencies").items():
        for each in pinned[name].specifier:
            assert each.version in asked.specifier, name


def test_an_ascend_image_is_asked_for_the_same() -> None:
    """But for torch, which comes with torch_npu."""
    on_npu = listed("requirements-npu.txt")
    for name, asked in ranges("dependencies").items():
        if name != "torch":
            assert on_npu[name].specifier == asked.specifier, name


def test_the_old_oracle_is_one_that_the_extra_admits() -> None:
    (pinned,) = listed("requirements-oracle.txt")["transformers"].specifier
    assert pinned.version in ranges("transformers")["transformers"].specifier
