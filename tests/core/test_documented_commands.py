"""Every command that README and the docs show is one that npu-runner takes: its options exist, and none is missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from npu_runner.cli.main import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^ {4,}npu-runner (.*)$", re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The arguments of each, without a comment behind them. One with `...` in it is not whole."""
    found = (shlex.split(line, comments=True) for line in COMMAND.findall(text.replace("\\\n", " ")))
    return [arguments for arguments in found if "..." not in arguments]


def shown() -> list[tuple[str, list[str]]]:
    return [(page.name, arguments) for page in PAGES for arguments in commands(page.read_text())]


def test_commands_are_found() -> None:
    text = "    npu-runner batch -i a \\\n        -o b   # c\n    npu-runner check ...\ntext npu-runner x\n"
    assert commands(text) == [["batch", "-i", "a", "-o", "b"]]
    assert len(shown()) > 30


@pytest.mark.parametrize(("page", "arguments"), shown(), ids=lambda value: value if isinstance(value, str) else None)
def test_a_shown_command_is_taken(page: str, arguments: list[str]) -> None:
    assert _parser().parse_args(arguments).run, f"{page}: {arguments}"
