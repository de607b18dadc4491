"""The lists of packages agree: ranges in pyproject.toml, pins of CI and of the oldest, an Ascend image's needs.

Knows nothing of what the packages do; scripts/test_environments.sh runs the oldest.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import BaseModel

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


def test_the_oldest_pydantic_warns_of_no_field() -> None:
    """Before 2.10 it writes a warning of each field named model_... to standard error, at the import of its class."""
    asked = re.compile(r"^class \w+\((?:BaseModel|\w*Body)\b", re.MULTILINE)
    for path in (ROOT / "npu_runner").rglob("*.py"):
        if asked.search(path.read_text()):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = list(subclasses(BaseModel))
    assert len(found) > 20
    warned = [each for each in found if any(name.startswith("model_") for name in each.model_fields)]
    assert warned, "the readers have such a field"
    assert all(each.model_config.get("protected_namespaces") == () for each in warned), warned


def subclasses(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Ours, each of them."""
    for each in base.__subclasses__():
        if each.__module__.startswith("npu_runner."):
            yield each
        yield from subclasses(each)


def test_an_ascend_image_is_asked_for_the_same() -> None:
    """But for torch, which comes with torch_npu."""
    on_npu = listed("requirements-npu.txt")
    for name, asked in ranges("dependencies").items():
        if name != "torch":
            assert on_npu[name].specifier == asked.specifier, name


def test_the_old_oracle_is_one_that_the_extra_admits() -> None:
    (pinned,) = listed("requirements-oracle.txt")["transformers"].specifier
    assert pinned.version in ranges("transformers")["transformers"].specifier


def test_no_hint_names_a_package_that_is_on_no_index() -> None:
    """npu-runner is on no index: whoever took its name there would be installed by such a hint."""
    pages = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md"]
    for folder, kind in (("npu_runner", "*.py"), ("strategies", "*.py"), ("scripts", "*"), ("docs", "*.md")):
        pages += [path for path in (ROOT / folder).rglob(kind) if path.is_file() and path.suffix != ".pyc"]
    named = re.compile(r"npu[-_]runner\[|pip3? install [^\n`]*(?<![\w/.-])npu[-_]runner(?![\w/.-])")
    found = [f"{path.relative_to(ROOT)}: {line}" for path in pages
             for line in path.read_text(errors="replace").splitlines() if named.search(line)]
    assert not found


def test_hints_ask_for_the_ranges_of_the_extras() -> None:
    """`pip install 'av>=17.1'` in a message is what pyproject.toml asks for."""
    asked = {str(each) for part in ("transformers", "ray", "heif", "video", "tables", "pdf")
             for each in ranges(part).values()}
    texts = [path.read_text() for folder in ("npu_runner", "strategies") for path in (ROOT / folder).rglob("*.py")]
    hints = {hint for text in texts for hint in re.findall(r"pip install '([^']+)'", text)}
    assert {str(Requirement(hint)) for hint in hints} == asked
