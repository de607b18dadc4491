"""docs/errors.md has a line for every error code that the code can give, and for no other. Reads sources only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from npu_runner.errors import CODES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
# Where a call names a code: the place among its arguments.
PLACES = {"RequestError": 1, "WorkerFailure": 1, "field_error": 2, "wrong_type": 3, "check_count": 4, "given_fields": 3,
          "not_followed": 1, "End": 3}
RETURNS = {"blame_for", "code_given_up"}
CODE = re.compile(r"[a-z]+(_[a-z0-9]+)+")


def codes_in(node: ast.AST | None) -> Iterator[str]:
    """Of an expression; `{kind}` of an f-string stays as `*`."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (code for each in (node.body, node.orelse) for code in codes_in(each))
    elif isinstance(node, ast.BoolOp):
        yield from (code for each in node.values for code in codes_in(each))


def named_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in PLACES and len(node.args) > PLACES[name]:
            yield from codes_in(node.args[PLACES[name]])
        yield from (code for keyword in node.keywords if keyword.arg == "code" for code in codes_in(keyword.value))
        if name == "by_tag":  # a type of an error of validation, which is a code where it begins so
            yield from (code for code in codes_in(node.args[1]) if code.startswith("unknown_"))
    elif isinstance(node, ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args]
        values = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
        yield from (code for argument, value in zip(arguments, values, strict=True) if argument.arg == "code"
                    for code in codes_in(value))
        if node.name in RETURNS:
            returns = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            yield from (code for value in returns for code in codes_in(value))
    elif isinstance(node, ast.Assign) and any(getattr(each, "id", "") in ("code", "_CODE") for each in node.targets):
        yield from codes_in(node.value)


def of_sources() -> set[str]:
    paths = [*(ROOT / "npu_runner").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
    return {code for path in paths for node in ast.walk(ast.parse(path.read_text())) for code in named_by(node)}


def test_the_page_has_the_codes_of_the_sources() -> None:
    on_page = re.findall(r"^\| `([a-z0-9_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(on_page) == len(set(on_page))
    assert set(on_page) == CODES, "which a ladder may name"
    sources = of_sources()
    patterns = [re.compile(re.escape(code).replace(r"\*", "[a-z]+")) for code in sources]
    assert not [code for code in on_page if not any(pattern.fullmatch(code) for pattern in patterns)], "gone"
    assert not sorted(code for code, pattern in zip(sources, patterns, strict=True)
                      if not any(pattern.fullmatch(named) for named in on_page)), "without a line"
