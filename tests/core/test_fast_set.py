"""A test that leaves the fast set is named, with its reason, in docs/testing.md: none is left out in silence.

`python -m tests.core.test_fast_set` writes that page's table from the marks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"
HEAD = "| test | why it is not in the fast set |\n|---|---|\n"


def left_out() -> Iterator[tuple[str, str]]:
    """(file::test, reason) of every test marked `full`."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []) if isinstance(node, ast.FunctionDef) else []:
                if ast.unparse(mark).startswith("pytest.mark.full"):
                    assert isinstance(mark, ast.Call), f"{path.name}::{node.name}: full needs a reason"
                    yield f"{path.relative_to(ROOT)}::{node.name}", ast.literal_eval(mark.args[0])


def with_table(page: str) -> str:
    """The page with the table of today's marks, which ends it."""
    before, head, _ = page.partition(HEAD)
    assert head, f"{PAGE.name} has no line {HEAD!r}"
    return before + HEAD + "".join(f"| `{name}` | {reason} |\n" for name, reason in left_out())


def test_the_docs_name_every_test_outside_the_fast_set_with_its_reason() -> None:
    table = dict(re.findall(r"^\| `(tests/[^`]+)` \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE))
    assert table == dict(left_out()), "run python -m tests.core.test_fast_set"


def test_the_page_has_the_table_that_is_written() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text())


def test_the_fast_set_and_the_full_one_differ_by_that_mark_alone() -> None:
    fast, everything, ci = ((ROOT / name).read_text() for name in ("scripts/test.sh", "scripts/test_all.sh", ".ci/run"))
    assert '-m "${TEST_MARKS-not full}" "$@"' in fast
    assert "TEST_MARKS='' bash scripts/test.sh" in everything
    assert "bash scripts/test.sh\n" in ci


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
