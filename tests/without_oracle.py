"""Lists the tests that need no transformers, by following imports: what the oldest supported packages are tested with.

    python -m tests.without_oracle [FILE_OR_FOLDER...]       pytest takes the list: pytest @list.txt

A definition (function, class, assignment) needs transformers if it imports it, or names a definition that does, in its
file or in another of tests, scripts and bench. A test needs its fixtures, too. A file that imports it at its top needs
it whole. Code of other programs in strings counts by its import statements, `python -m` by the module's name. Runs
nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORACLE = "transformers"
_IMPORTED = re.compile(rf"^\s*(?:import|from) {ORACLE}\b", re.MULTILINE)
_OWN_MODULE = re.compile(r"(?:tests|scripts|bench)(?:\.\w+)+")
# The emulated CANN brings packages of its own, in front of those of the environment.
_ELSEWHERE = ("tests/npu", "tests/cann", "tests/cuda")

Name = tuple[Path, str]
"""A definition: its file, and its name there."""


class Source:
    """What a file defines, and what its top imports."""

    def __init__(self, path: Path):
        tree = ast.parse(path.read_text())
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imported: dict[str, Name | None] = {}
        self.needs_oracle = False
        for statement in tree.body:
            for name in _defined(statement):
                self.definitions.setdefault(name, []).append(statement)
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.needs_oracle |= _imports_oracle(statement)
                self.imported |= dict(_imported(statement, path))
            elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.needs_oracle |= any(map(_imports_oracle, ast.walk(statement)))
        # What a file of ours imports at its top runs, too.
        files = (name[0] for name in self.imported.values() if name is not None)
        self.needs_oracle |= any(source(file).needs_oracle for file in dict.fromkeys(files))


@cache
def source(path: Path) -> Source:
    return Source(path)


def needs_oracle(path: Path, name: str) -> bool:
    """Whether a test needs transformers, itself or by what it names."""
    waiting: list[Name] = [(path, name)]
    seen = set(waiting)
    while waiting:
        imports, named = _read(*waiting.pop())
        if imports:
            return True
        waiting += named - seen
        seen |= named
    return False


def tests_of(path: Path) -> Iterator[tuple[str, bool]]:
    """(name, whether it needs transformers) of each test function."""
    for name in source(path).definitions:
        if name.startswith("test_"):
            yield name, needs_oracle(path, name)


def listed(places: Iterable[Path]) -> Iterator[str]:
    """What pytest takes: a file, or those of its tests that need none."""
    for place in places:
        for path in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
            name = str(path.relative_to(ROOT))
            tests = dict(tests_of(path)) if not name.startswith(_ELSEWHERE) else {}
            if tests and not any(tests.values()):
                yield name
            else:
                yield from (f"{name}::{test}" for test, needs in tests.items() if not needs)


@cache
def _read(file: Path, name: str) -> tuple[bool, frozenset[Name]]:
    """Whether a definition imports transformers, and what it names."""
    if source(file).needs_oracle or any(map(_imports_oracle, _nodes(file, name))):
        return True, frozenset()
    return False, frozenset(_named(file, name))


# -- helpers -----------------------------------------------------------------------------------------------------------


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target is not None for node in ast.walk(target)
            if isinstance(node, ast.Name)]  # fmt: skip


def _imports_oracle(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == ORACLE for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == ORACLE and not node.level
    if isinstance(node, ast.Call) and any(getattr(each, "value", None) == ORACLE for each in node.args):
        return ast.unparse(node.func) in ("pytest.importorskip", "importlib.import_module")
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_IMPORTED.search(node.value))


def _imported(statement: ast.Import | ast.ImportFrom, path: Path) -> Iterator[tuple[str, Name | None]]:
    """Name here, and the definition it stands for; the name "" for all of a module."""
    for alias in statement.names:
        here = alias.asname or alias.name
        if isinstance(statement, ast.Import):
            file = _file(alias.name, path)
            yield here, file and (file, "")
            continue
        module = "." * statement.level + (statement.module or "")
        inner, outer = _file(f"{module}.{alias.name}", path), _file(module, path)
        yield here, (inner, "") if inner else outer and (outer, alias.name)


def _file(module: str, path: Path) -> Path | None:
    """Of a module of tests, scripts or bench, as `path` imports it; None for all others."""
    steps = len(module) - len(module.lstrip("."))
    inside = module.strip(".").replace(".", "/")
    folder = path.parents[steps - 1] if steps else ROOT
    for place in [folder, path.parent]:  # pytest puts a file's folder on the path where that is no package
        if (found := place / f"{inside}.py").is_file() and not inside.startswith("npu_runner"):
            return found
    return None


def _nodes(file: Path, name: str) -> Iterator[ast.AST]:
    """Of a definition; of the whole file for the name ""."""
    definitions = source(file).definitions
    for statements in definitions.values() if not name else [definitions.get(name, [])]:
        for statement in statements:
            yield from ast.walk(statement)


def _named(file: Path, name: str) -> Iterator[Name]:
    """Definitions that one names: here, imported, as fixtures, or as modules of programs."""
    here = source(file)
    for node in _nodes(file, name):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (found for _, found in _imported(node, file) if found is not None)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((found, "") for module in _OWN_MODULE.findall(node.value) if (found := _file(module, file)))
        names = [node.id] if isinstance(node, ast.Name) else [node.arg] if isinstance(node, ast.arg) else []
        for each in names:
            if each in here.definitions:
                yield file, each
            elif (found := here.imported.get(each)) is not None:
                yield found
            elif isinstance(node, ast.arg):
                yield from _fixtures(file, each)


def _fixtures(file: Path, name: str) -> Iterator[Name]:
    for folder in file.parents:
        if (found := folder / "conftest.py").is_file() and name in source(found).definitions:
            yield found, name
        if folder == ROOT:
            return


if __name__ == "__main__":
    print("\n".join(listed([ROOT / place for place in sys.argv[1:]] or [ROOT / "tests"])))
