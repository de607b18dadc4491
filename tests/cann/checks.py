"""Turns the check_* functions of a program into tests: one subprocess for the program, one test for each function."""

from __future__ import annotations

import ast
import functools
import json

from .environment import HERE, run_python


def check_names(program: str) -> list[str]:
    """The names, read from the source: collecting tests must not import torch_npu."""
    tree = ast.parse((HERE / "programs" / f"{program}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@functools.cache
def _results(program: str, options: str) -> dict[str, str] | str:
    """What each check says, or how the program died."""
    done = run_python(["-m", "tests.cann.programs.run_checks", f"tests.cann.programs.{program}"], **json.loads(options))
    for line in done.stdout.splitlines():
        if line.startswith("RESULTS "):
            result: dict[str, str] = json.loads(line.removeprefix("RESULTS "))
            return result
    return f"{program} died with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def assert_check(program: str, name: str, **options: object) -> None:
    results = _results(program, json.dumps(options, sort_keys=True))
    result = results if isinstance(results, str) else results[name]
    assert result == "ok", result
