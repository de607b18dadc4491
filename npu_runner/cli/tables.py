"""The commands beside the job: rows, table and merge. Turns their options into settings, and prints their results.

Knows nothing of models.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from npu_runner.cli.options import add_options, read_settings
from npu_runner.cli.parser import Commands, accept_old_spelling, add_command
from npu_runner.errors import ConfigError
from npu_runner.tables.options import MergeOptions, RowsOptions, TableOptions


def add_rows(commands: Commands) -> None:
    parser = add_command(
        commands, "rows", _rows,
        "make the rows of a job: of folders of documents and images, CSV, JSONL or Parquet, a Hugging Face dataset",
        "Makes a row of every page, image, video or record of the sources, for npu-runner batch. The same "
        "sources give the same bytes. Parquet and datasets need pyarrow (pip install 'pyarrow>=17').")
    parser.add_argument("sources", nargs="+", metavar="SOURCE",
                        help="a folder, a file, or a pattern in quotes such as 'photos/**/*.png'")
    add_options(parser, RowsOptions, "rows")


def _rows(arguments: argparse.Namespace) -> int:
    (options,) = read_settings(arguments, RowsOptions)
    if options.rows is not None:
        from npu_runner.tables.block_rows import make_block_rows

        return _report(make_block_rows(arguments.sources, options).to_lines())
    from npu_runner.batch.files.output_lock import job_at_work
    from npu_runner.tables.make_rows import make_rows

    if (pid := job_at_work(Path(os.path.realpath(options.output)))) is not None:
        raise ConfigError(f"rows {options.output}: npu-runner read (pid {pid}) is at work on them; wait for it, or "
                          "choose another output")
    return _report(make_rows(arguments.sources, options).to_lines())


def add_table(commands: Commands) -> None:
    parser = add_command(
        commands, "table", _table, "make a table of the answers of a job: Parquet, CSV, JSONL, or vectors as .npy",
        "Makes a line of every answer: metadata, text, the fields of an answer that is JSON, how it ended, "
        "tokens. The job may be at work meanwhile. Loads no model. Parquet needs pyarrow (pip install 'pyarrow>=17').")
    parser.add_argument("answers", metavar="ANSWERS", help="the output of a job, which may be at work")
    add_options(parser, TableOptions, "table")
    parser.add_argument("--rows", dest="old_rows", help=argparse.SUPPRESS)


def _table(arguments: argparse.Namespace) -> int:
    accept_old_spelling(arguments, "old_rows", "table --rows")
    (options,) = read_settings(arguments, TableOptions)
    from npu_runner.tables.make_table import make_table

    return _report(make_table(arguments.answers, options).to_lines())


def add_merge(commands: Commands) -> None:
    parser = add_command(
        commands, "merge", _merge, "put two outputs of one input together",
        "Each row once: a whole answer counts more than another one, an answer more than a failure, and else the first "
        "output more than the second. The rows that are left out are named.")
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), help="the output of a job, with its error file")
    add_options(parser, MergeOptions, "merge")


def _merge(arguments: argparse.Namespace) -> int:
    (options,) = read_settings(arguments, MergeOptions)
    from npu_runner.tables.merge_outputs import merge

    return _report(merge(arguments.first, arguments.second, options).to_lines())


def _report(lines: list[str]) -> int:
    # Standard output may be the file that the command writes.
    print("\n".join(lines), file=sys.stderr)
    return 0
