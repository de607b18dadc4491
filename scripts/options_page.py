"""Writes docs/options.md: every option with its values, its default and the words that stand under its field.

    python scripts/options_page.py

A test compares the page with what this makes. Knows no option itself, but for where to read more about one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.options import Option, options_of, with_parts
from npu_runner.config import RunnerConfig

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
_HEAD = """\
<!-- Made by scripts/options_page.py from the docstrings in the code; edit those and run it again. -->

# Options

Of the `npu-runner` command, and of `LLM(...)` in [the Python API](python.md), with underscores instead of hyphens. SIZE
is a number of bytes; on the command line it may end in K, M or G. An option without a value is a switch. Where the
meaning says nothing of a default, the third column does.
"""
_OF = {
    "job": "`npu-runner batch` alone.",
    "replicas": "`npu-runner batch` and `LLM`.",
    "workers": "`npu-runner batch` and `LLM`: the processes that prepare requests.",
    "model": "`npu-runner batch`, `npu-runner generate` and `LLM`, as all that follow.",
}
_SEE = {
    "error_file": "[failed rows](batch.md#failed-rows)",
    "data_parallel_size": "[many devices](scale.md)",
    "ray": "[many hosts](scale.md#many-hosts-through-ray)",
    "response_schema": "[answers that parse](structured.md)",
    "max_num_seqs": "[memory](architecture.md#memory)",
}
_DEFAULTS = {"model": "shapes-vl, embedded (`LLM`: needed)"}


def page() -> str:
    """The whole page."""
    sections = [*with_parts("job", BatchOptions), *with_parts("model", RunnerConfig)]
    return _HEAD + "".join(_section(title, options_of(kind)) for title, kind in sections)


def _section(title: str, options: Sequence[Option]) -> str:
    whose = f"{_OF[title]}\n\n" if title in _OF else ""
    rows = "".join(_row(option) for option in options)
    return f"\n## {title.capitalize()}\n\n{whose}| option | value | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(option: Option) -> str:
    name = option.field.name
    values = ", ".join(f"`{choice}`" for choice in option.choices) or option.values
    default = _DEFAULTS.get(name, "needed" if option.is_needed else option.default)
    meaning = f"{option.text} See {_SEE[name]}." if name in _SEE else option.text
    cells = (f"`{option.flag}`", values, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
