"""A test that leaves the fast set is named, with its reason, in docs/testing.md: none is left out in silence.

`python -m tests.core.test_fast_set` writes that page's table from the marks.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"
HEAD = "| test | why it is not in the fast set |\n|---|---|\n"


@functools.cache
def left_out() -> dict[str, str]:
    """The reason of every `file::test` marked `full`, and of every `file::test[some cases]`."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text))) if "pytest.mark.full" in text or "only_full" in text else []
        decorators = [(node.name, mark) for node in nodes if isinstance(node, ast.FunctionDef)
                      for mark in node.decorator_list]
        for test, mark in decorators:
            for cases, why in reasons_in(mark):
                name = f"{path.relative_to(ROOT)}::{test}{cases}"
                found[name] = f"{found[name]}; {why}" if name in found else why
        listed = sum(len(calls_of("only_full", mark)) for _, mark in decorators)
        assert listed == sum(is_call_of("only_full", node) for node in nodes), f"{path.name}: only_full in no decorator"
    return found


def is_call_of(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def calls_of(name: str, within: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(within) if isinstance(node, ast.Call) and is_call_of(name, node)]


def reasons_in(decorator: ast.expr) -> Iterator[tuple[str, str]]:
    """("", reason) of a test, ("[some cases]", reasons) of its cases."""
    if ast.unparse(decorator).startswith("pytest.mark.full"):
        assert isinstance(decorator, ast.Call), f"line {decorator.lineno}: full needs a reason"
        yield "", ast.literal_eval(decorator.args[0])
        return
    assert not calls_of("pytest.mark.full", decorator), "only_full marks cases"
    if said := [ast.literal_eval(call.args[0]) for call in calls_of("only_full", decorator)]:
        yield "[some cases]", "; ".join(dict.fromkeys(said))


def with_table(page: str) -> str:
    """The page with the table of today's marks, which ends it."""
    before, head, _ = page.partition(HEAD)
    assert head, f"{PAGE.name} has no line {HEAD!r}"
    return before + HEAD + "".join(f"| `{name}` | {reason} |\n" for name, reason in left_out().items())


def test_the_docs_name_every_test_outside_the_fast_set_with_its_reason() -> None:
    table = dict(re.findall(r"^\| `(tests/[^`]+)` \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE))
    assert table == left_out(), "run python -m tests.core.test_fast_set"


def test_the_page_has_the_table_that_is_written() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text())


def test_the_fast_set_and_the_full_one_differ_by_that_mark_alone() -> None:
    fast, everything, ci = ((ROOT / name).read_text() for name in ("scripts/test.sh", "scripts/test_all.sh", ".ci/run"))
    assert '-m "${TEST_MARKS-not full}" "$@"' in fast
    assert "TEST_MARKS='' bash scripts/test.sh" in everything
    assert "bash scripts/test.sh\n" in ci


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
