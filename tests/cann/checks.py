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
def _run(program: str, options: str) -> tuple[dict[str, str], list[str]] | str:
    """What each check says and which operators ran, or how the program died."""
    done = run_python(["-m", "tests.cann.programs.run_checks", f"tests.cann.programs.{program}"], **json.loads(options))
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("RESULTS ", "OPERATORS ")))
    if len(lines) < 2:
        return f"{program} died with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines["RESULTS"]), json.loads(lines["OPERATORS"])


def _outcome(program: str, options: dict[str, object]) -> tuple[dict[str, str], list[str]]:
    outcome = _run(program, json.dumps(options, sort_keys=True))
    assert not isinstance(outcome, str), outcome
    return outcome


def assert_check(program: str, name: str, **options: object) -> None:
    result = _outcome(program, options)[0][name]
    assert result == "ok", result


def operators_of(program: str, **options: object) -> set[str]:
    """Names of the operators that the checks of the program launched or captured."""
    return set(_outcome(program, options)[1])
