"""Makes the rows of `read`. Rows that are there are replaced only where no answer, and no file of the user, is lost.

Of the job it knows the names of files alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.names import manifest_path
from npu_runner.errors import ConfigError
from npu_runner.tables.described_rows import documents_path
from npu_runner.tables.make_rows import MadeRows, make_rows
from npu_runner.tables.options import RowsOptions


def make_kept_rows(names: Sequence[str], rows: RowsOptions, results: Path, answers: Path, *, is_anew: bool) -> MadeRows:
    """`answers`: where the job writes them. `is_anew`: what is there is given up. Raises ConfigError where something
    would be lost; then no file has changed."""
    make = partial(make_rows, names, results=results)
    pages = Path(os.path.realpath(rows.output))
    is_described, is_answered = documents_path(pages).exists(), answers.exists() or manifest_path(answers).exists()
    is_kept = pages.exists() and not is_anew
    is_continued = is_kept and rows.sample is None and (is_described or is_answered)
    if is_continued or not is_kept or (is_described and not is_answered):
        return make(replace(rows, append=is_continued))
    # A trial has answers, or rows have no description: a command that was killed between its first two files has left
    # them, or they are the user's own. This command replaces them by the same rows, and perhaps more behind them.
    new = pages.with_name(f".{pages.name}.new")
    try:
        made = make(replace(rows, output=str(new)))
        with clear_file_errors(f"rows {pages}"), new.open("rb") as file, pages.open("rb") as there:
            if any(file.read(len(part)) != part for part in iter(partial(there.read, 1 << 20), b"")):
                raise ConfigError(f"rows {rows.output}: {'have answers' if is_answered else 'are there already'}, and "
                                  "this command makes others; --overwrite replaces them, or name another folder")
            new.replace(pages)
            documents_path(new).replace(documents_path(pages))
    finally:
        for path in (new, documents_path(new)):
            path.unlink(missing_ok=True)
    return replace(made, options=rows)
