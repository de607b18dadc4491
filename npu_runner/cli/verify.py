"""`npu-runner verify`: compares the answers to some rows with transformers. Prints both numbers of each row."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.options import add_model_options, add_some_options, read_model_settings
from npu_runner.cli.parser import Commands, add_command
from npu_runner.errors import ConfigError

if TYPE_CHECKING:
    from npu_runner.batch.check.verify import Verified

_JOB_OPTIONS = {"allowed_media_dir", "max_row_bytes", "preprocessing_workers", "preprocessing_timeout",
                "max_media_bytes", "max_prompt_media_bytes", "worker_memory_bytes", "pdf_passwords"}


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "verify", run, "compare the answers to some rows with transformers",
        "Answers some rows of a job, greedy and without rules, and has transformers score each answer in float32 on "
        "the host, which takes the weights' number times 4 bytes. Exit status 0: no row is a fault, 1: some are.")
    parser.add_argument("--rows", metavar="FILE", required=True, help="the rows of a job; - reads standard input")
    parser.add_argument("--num", type=int, default=20, metavar="N", help="rows to compare, evenly spread (default: 20)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N",
                        help="most tokens of an answer (default: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file, as JSON")
    add_some_options(parser, BatchOptions, "as the job is given them", _JOB_OPTIONS)
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the result. Returns 0 if no row is a fault, else 1."""
    for name in ("num", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(arguments, name)} is not a positive number")
    arguments.input = arguments.rows
    config, options = read_model_settings(arguments, BatchOptions, output="-")
    from npu_runner.batch.check.verify import verify  # torch comes with it

    found = verify(config, options, num_rows=arguments.num, max_tokens=arguments.max_tokens,
                   say=lambda line: print(line, file=sys.stderr))
    print("\n".join(_lines(found)))
    if arguments.json is not None:
        with clear_file_errors(f"json {arguments.json}"):
            arguments.json.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    return 1 if found.num_faults else 0


def _lines(found: Verified) -> list[str]:
    lines = [f"reference {found.reference}",
             f"bounds    {found.bounds.median:g} for the median and {found.bounds.gap:g} for the gap, or 4 medians "
             f"({found.dtype})",
             "          median      gap  others  tokens"]
    for row in found.rows:
        word = "FAULT" if row.is_fault else "right"
        lines.append(f"{word:<9} {row.median:7.1e}  {row.gap:7.1e}  {row.num_other:6}  {row.num_tokens:6}  {row.name}")
    lines += [f"left out  {name}: {reason}" for name, reason in found.left_out.items()]
    return [*lines, f"rows      {len(found.rows)} compared, {found.num_faults} faults, {len(found.left_out)} left out"]
