"""Lists the test files that a change can reach, the nearest first. It follows imports and runs nothing.

    python -m scripts.changed_tests [BASE]      # the changes since BASE (HEAD); pytest takes the list: pytest @list.txt

An import counts wherever it stands: within a function, or in a program that is a string. A string that names a module,
a script or the command counts, too, because processes are started with it. A registry, which imports the modules of
its folder by their names, reaches all of them. A test reaches its conftest.py and the fixtures that it names; what a
fixture imports counts for these tests only. A page reaches the tests that read pages, any other file that is not Python
reaches all tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("npu_runner", "strategies", "scripts", "bench", "tests")
_LINK = "npu_runner/strategies"
"""A link to strategies/, whose modules have two names."""
_HOLDS_NO_CALLS = ("npu_runner/__init__.py", "tests/zygote.py")
"""One loads names lazily, the other imports early what programs import. Neither uses what it imports."""
_MODULE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+\.?")
_IMPORT = re.compile(r"\bfrom ([\w.]+) import ([\w, ]+)")
_COMMAND = re.compile(r"^npu[-_]runner$|/npu-runner$|-m npu_runner\b|\.sh$")
_TEST = re.compile(r"tests/(?:.*/)?test_\w+\.py")


class Reach:
    """Which files reach which. Names are paths in the tree; `tests/conftest.py:name` is a fixture."""

    def __init__(self, root: Path, gone: Iterable[str] = ()):
        found = (str(path.relative_to(root)) for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.files = {file for file in (*found, *gone) if not file.startswith(_LINK) and file.endswith(".py")}
        self.modules = {file[:-3].removesuffix("/__init__").replace("/", "."): file for file in self.files}
        self.modules |= {f"npu_runner.{name}": file for name, file in self.modules.items()
                         if name.partition(".")[0] == "strategies"}
        self.reached_by: defaultdict[str, set[str]] = defaultdict(set)
        texts = {file: (root / file).read_text() for file in self.files if (root / file).is_file()}
        self.lazy_names = dict(re.findall(r'"(\w+)": "([\w.]+)"', texts.get("npu_runner/__init__.py", "")))
        self.readers_of_pages = {file for file in texts if file.startswith(PACKAGES[2:]) and '.md"' in texts[file]}
        trees = {file: ast.parse(text) for file, text in texts.items() if file not in _HOLDS_NO_CALLS}
        self.fixtures = {file: [node for node in tree.body if isinstance(node, ast.FunctionDef)]
                         for file, tree in trees.items() if file.endswith("conftest.py")}
        for file, tree in trees.items():
            for fixture in self.fixtures.get(file, []):
                tree.body.remove(fixture)
                self._add(f"{file}:{fixture.name}", fixture, file)
            self._add(file, tree, file)

    def tests_of(self, changed: Iterable[str]) -> list[str]:
        """The test files that can reach one of these files, or `tests` for all."""
        waiting = list(changed)
        if any(self._reaches_all(file) for file in waiting):
            return ["tests"]
        # An import of a module runs the packages around it.
        waiting += [file for package in waiting if package.endswith("/__init__.py")
                    for file in sorted(self.files) if file.startswith(package.removesuffix("__init__.py"))]
        found = set(waiting)
        for file in waiting:  # grows meanwhile
            more = self.readers_of_pages if file.endswith(".md") else self.reached_by[file]
            waiting += sorted(more - found)
            found |= more
        return list(dict.fromkeys(file for file in waiting if _TEST.fullmatch(file) and file in self.files))

    def _reaches_all(self, file: str) -> bool:
        if not file.startswith(PACKAGES) or not file.endswith(".py"):
            return not file.endswith(".md")
        # A helper that no import names is found in another way, such as a variable of the environment.
        return file.startswith("tests/") and not _TEST.fullmatch(file) and not self.reached_by[file]

    def _add(self, user: str, tree: ast.AST, file: str) -> None:
        for target in self._targets(tree, file):
            if target != user:
                self.reached_by[target].add(user)

    def _targets(self, tree: ast.AST, file: str) -> Iterator[str]:
        nodes = list(ast.walk(tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        words: set[object] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._module(alias.name, file)
            elif isinstance(node, ast.ImportFrom):
                parents = Path(file).parts[: -node.level] if node.level else ()
                for alias in node.names:
                    yield from self._module(".".join([*parents, *filter(None, [node.module]), alias.name]), file)
            elif isinstance(node, ast.Name) and node.id == "iter_modules":
                yield from self._folder(".".join(Path(file).parts[:-1]))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                words.add(node.value)
                yield from self._named(node.value, file)
            elif isinstance(node, ast.arg):
                words.add(node.arg)
        for conftest in (str(folder / "conftest.py") for folder in Path(file).parents):
            yield from {conftest} & self.fixtures.keys()
            for fixture in self.fixtures.get(conftest, []):
                if fixture.name in words or any("autouse" in ast.unparse(each) for each in fixture.decorator_list):
                    yield f"{conftest}:{fixture.name}"

    def _named(self, text: str, file: str) -> Iterator[str]:
        """The modules, programs and commands that a string names. The package names the command in messages only."""
        for name in _MODULE.findall(text):
            yield from self._folder(name[:-1]) if name.endswith(".") else self._module(name, file)
        for module, names in _IMPORT.findall(text):
            for name in names.split(","):
                yield from self._module(f"{module}.{name.strip()}", file)
        if file.startswith(PACKAGES[2:]):
            if _COMMAND.search(text):
                yield "npu_runner/__main__.py"
            if text.endswith(".sh"):  # it may start any of them
                yield from self._folder("scripts")
            if text.endswith(".py"):
                yield from (each for each in self.files if f"/{each}".endswith(f"/{text}"))

    def _module(self, name: str, file: str) -> Iterator[str]:
        """The file of the longest part of a dotted name that is one. The packages around it are passed through."""
        package, _, last = name.rpartition(".")
        name = self.lazy_names.get(last, name) if package == "npu_runner" else name
        for place in (name, ".".join([*Path(file).parts[:-1], name])):  # pytest puts some tests' folders on the path
            while place and place not in self.modules:
                place = place.rpartition(".")[0]
            if place:
                yield self.modules[place]
                return

    def _folder(self, package: str) -> Iterator[str]:
        yield from (file for module, file in self.modules.items() if module.rpartition(".")[0] == package)


def changed_since(base: str) -> list[str]:
    """Files that differ from where this branch left `base`, also those that git does not know yet."""
    def lines(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.splitlines()

    return sorted({*lines("diff", "--name-only", "--no-renames", "--merge-base", base),
                   *lines("ls-files", "--others", "--exclude-standard")})


if __name__ == "__main__":
    files = changed_since(*sys.argv[1:] or ["HEAD"])
    print("\n".join(Reach(ROOT, gone=files).tests_of(files)))
