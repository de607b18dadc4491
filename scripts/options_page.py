"""Writes docs/options.md: every option with its values, its default and the words that stand under its field.

    python scripts/options_page.py

A test compares the page with what this makes. Knows no option itself, but for where to read more about one.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.main import _parser
from npu_runner.cli.options import Option, options_of, with_parts
from npu_runner.config import RunnerConfig, flat_fields
from npu_runner.processes.log_level import LEVELS, VARIABLE

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
_HEAD = """\
<!-- Made by scripts/options_page.py from the docstrings in the code; edit those and run it again. -->

# Options

These are the options of the `npu-runner` command. Those of the model, its replicas and its workers are settings of
`LLM(...)` in [the Python API](python.md) as well, with underscores instead of hyphens. `npu-runner COMMAND --help`
shows what a first user needs, `--help-all` shows all. SIZE is a number of bytes; on the command line it may end in K, M
or G. An option without a value is a switch, and a value `--no-...` is the form that turns it off. Where the meaning
says nothing of a default, the third column does.
"""
_OF = {
    "job": "`npu-runner batch` alone.",
    "replicas": "`npu-runner batch` and `LLM`.",
    "workers": "`npu-runner batch` and `LLM`: the processes that prepare requests.",
    "model": "`npu-runner batch`, `check`, `verify`, `generate` and `LLM`; so are the five tables that follow.",
}
_SEE = {
    "error_file": "[failed rows](batch.md#failed-rows)",
    "data_parallel_size": "[many devices](scale.md)",
    "ray": "[many hosts](scale.md#many-hosts-through-ray)",
    "response_schema": "[answers that parse](structured.md)",
    "max_num_seqs": "[memory](architecture.md#memory)",
}
_EVERY = f"""
## Every command

| option | value | meaning |
|---|---|---|
| `--log-level` | {", ".join(f"`{level}`" for level in LEVELS)} | Show what is logged from this level on, in every \
process of this host. `{VARIABLE}` does the same, for `LLM` as well. Without either, warnings are shown |
"""
_OF_ALL = {"help", "help_all", "log_level"}
_WITH_SETTINGS = {
    "check": "Beside those of the model, and those of the job that decide what a row becomes",
    "verify": "Beside those of the model, and those of the job that decide what a row becomes",
    "generate": "Beside those of the model",
    "doctor": "With `--fits`, beside those of the model that take memory",
    "models": "Beside `--revision`, `--runner` and `--task`",
}
_BESIDE = {name: f"{text}:\n\n" for name, text in _WITH_SETTINGS.items()}
_DEFAULTS = {"model": "shapes-vl, embedded (`LLM`: needed)"}


def page() -> str:
    """The whole page."""
    sections = [*with_parts("job", BatchOptions), *with_parts("model", RunnerConfig)]
    commands: Any = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    known = flat_fields(BatchOptions).keys() | flat_fields(RunnerConfig).keys() | {"help", "help_all", "log_level"}
    return (_HEAD + "".join(_section(title, options_of(kind)) for title, kind in sections) + _EVERY
            + "".join(_command(name, parser, known if name in _WITH_SETTINGS else _OF_ALL)
                      for name, parser in commands.items() if name not in ("batch", "help")))


def _command(name: str, parser: Any, known: Collection[str]) -> str:
    """What a command takes beside the settings above."""
    rows = ""
    for action in parser._actions:
        if action.dest not in known and action.help != argparse.SUPPRESS:
            title = f"`{action.option_strings[-1]}`" if action.option_strings else f"{action.metavar or action.dest}"
            values = "" if not action.option_strings or action.nargs == 0 else action.metavar
            if action.choices is not None:
                values = ", ".join(f"`{choice}`" for choice in action.choices)
            help = action.help.replace("%%", "%")
            rows += "| " + " | ".join(cell.replace("|", "\\|") for cell in (title, values, help)) + " |\n"
    return f"\n## npu-runner {name}\n\n{_BESIDE.get(name, '')}| option | value | meaning |\n|---|---|---|\n{rows}"


def _section(title: str, options: Sequence[Option]) -> str:
    whose = f"{_OF[title]}\n\n" if title in _OF else ""
    rows = "".join(_row(option) for option in options)
    return f"\n## {title.capitalize()}\n\n{whose}| option | value | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(option: Option) -> str:
    name = option.field.name
    values = ", ".join(f"`{choice}`" for choice in option.choices) or option.values
    if option.kind is bool and option.field.default is not False:
        values = f"`--no-{option.flag[2:]}`"
    default = _DEFAULTS.get(name, "needed" if option.is_needed else option.default)
    meaning = f"{option.text} See {_SEE[name]}." if name in _SEE else option.text
    cells = (f"`{option.flag}`", values, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
