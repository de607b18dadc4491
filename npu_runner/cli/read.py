"""`npu-runner read`: documents in, Markdown out: the steps `rows`, `batch` and `table` with their files in one folder.

Called again it goes on with the same files. Each step is the function of its command; knows nothing of pages or models.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.names import manifest_path
from npu_runner.batch.files.output_lock import OutputLock
from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.options import add_model_options, add_some_options, read_model_settings
from npu_runner.cli.parser import Commands, add_command
from npu_runner.config import RunnerConfig
from npu_runner.tables.options import RowsOptions, TableOptions

if TYPE_CHECKING:
    from npu_runner.reports.summary import Totals
    from npu_runner.tables.page_markdown import PageCounts

_OF_ROWS = ("reader", "prompt", "prompt_file", "system", "prompt_python", "pages", "dpi", "pdf_passwords", "max_tokens",
            "sample", "preprocessing_workers", "preprocessing_timeout")
_OF_JOB = ("retry", "accept_changed", "overwrite", "max_failures", "data_parallel_size", "progress", "report",
           "ladder")
_PAGES, _ANSWERS = "pages.jsonl", "answers.jsonl"
_BLOCK_ROWS, _BLOCK_ANSWERS = "block-rows.jsonl", "block-answers.jsonl"


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "read", run, "read documents: a folder of PDFs, TIFFs and images in, a Markdown file of each out",
        "Makes rows of the pages, answers them, and writes Markdown, blocks and a table into one folder. Run "
        "again, it adds new documents, and answers the pages without an answer. The exit status is the highest one of "
        "the steps (npu-runner batch --help).")
    parser.add_argument("sources", nargs="+", metavar="DOCS",
                        help="a folder, a file, or a pattern in quotes such as 'reports/**/*.pdf'")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FOLDER",
                        help="the folder of all results; it is made where it is not there")
    add_some_options(parser, RowsOptions, "rows", _OF_ROWS)
    add_some_options(parser, BatchOptions, "job", _OF_JOB)
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the steps. Returns the highest exit status of them; raises what they raise."""
    from npu_runner.reports.report import check_batch, run_batch_and_report
    from npu_runner.tables.prompt_text import find_page_reader
    from npu_runner.tables.sources import find_sources

    sample = getattr(arguments, "sample", None)
    # Another prompt or reader may follow a trial, so a trial has files of its own.
    folder = arguments.output if sample is None else arguments.output / f"sample-{sample}"
    root = Path(find_sources(arguments.sources, arguments.output).root)
    config, job = read_model_settings(arguments, BatchOptions, input=str(folder / _PAGES),
                                      output=str(folder / _ANSWERS), allowed_media_dir=root)
    rows = _rows_options(arguments, config, folder / _PAGES)
    reader, _ = find_page_reader(rows)
    blocks = None if reader is None else _reader_of_blocks(reader.name)
    given = job.ladder
    if reader is not None:
        job = _with_ladder(job, given, rows.reader or reader.name)
    for each in dict.fromkeys((arguments.output, folder)):
        with clear_file_errors(f"output {each}"):
            each.mkdir(exist_ok=True)
    from npu_runner.readers.answers.html_tags import require
    from npu_runner.tables.kept_rows import make_kept_rows

    for package in ("nh3", "markdownify"):
        require(package)  # and not after hours of answers
    for each_job in (job, *([] if blocks is None else [_with_ladder(job, given, blocks)])):
        check_batch(config, each_job)  # and not after pages were opened
    of_rows, of_answers, of_blocks = (OutputLock(Path(os.path.realpath(folder / name)))
                                      for name in (_PAGES, _ANSWERS, _BLOCK_ANSWERS))
    with of_rows:  # no other `read` changes the folder meanwhile
        with of_answers, of_blocks:  # no `batch` is at the answers now; the jobs below take these locks again
            pass
        made = make_kept_rows(arguments.sources, rows, arguments.output, folder / _ANSWERS, is_anew=job.overwrite)
        _say([*made.to_lines()[:-1], *_lines_of_fonts(made.described.num_documents)])
        if job.overwrite:  # a run that is cut short before the second stage leaves no blocks of other layouts
            for path in (manifest_path(folder / _BLOCK_ANSWERS), folder / _BLOCK_ANSWERS):
                with clear_file_errors(f"output {path}"):
                    path.unlink(missing_ok=True)
        jobs = [job]
        if blocks is not None and job.retry and (folder / _BLOCK_ANSWERS).exists():
            # Another layout has other blocks, and a job removes no row that it has answered.
            _say(["retry     of blocks alone: the layouts of pages stay, because their blocks are answered"])
            jobs = [replace(job, retry=())]
        ended = run_batch_and_report(config, jobs[0], unit="page")
        statuses = [ended.exit_status]
        if blocks is not None and not ended.is_interrupted:
            from npu_runner.tables.block_rows import make_block_rows

            block_rows = str(folder / _BLOCK_ROWS)
            _say(make_block_rows([job.output], RowsOptions(
                output=block_rows, reader=blocks, rows=job.input, max_tokens=rows.max_tokens)).to_lines())
            jobs.append(replace(_with_ladder(job, given, blocks), input=block_rows, output=str(folder / _BLOCK_ANSWERS),
                                report=None))
            ended = run_batch_and_report(config, jobs[-1], unit="block")
            statuses.append(ended.exit_status)
        if not ended.is_interrupted:
            _write_results(folder, jobs)
        return max(statuses)


def _with_ladder(job: BatchOptions, given: str | None, reader: str) -> BatchOptions:
    """`given` goes before the ladder of the reader, which is a name or a file."""
    from npu_runner.readers.reader import read_reader

    return replace(job, ladder=given or (reader if read_reader(reader).ladder else None), ladder_reader=reader)


def _reader_of_blocks(name: str) -> str | None:
    """The reader of the second stage, where this one is the first."""
    from npu_runner.readers.reader import shipped_readers

    return next((each.name for each in shipped_readers().values() if each.after == name), None)


def _write_results(folder: Path, jobs: Sequence[BatchOptions]) -> None:
    from npu_runner.reports.summary import PastJob
    from npu_runner.tables.make_table import make_table

    table = make_table(jobs[-1].output, TableOptions(
        output=str(folder / f"pages.{'parquet' if importlib.util.find_spec('pyarrow') else 'csv'}"),
        input=jobs[-1].input, markdown=folder / "markdown", blocks=str(folder / "blocks.jsonl")))
    assert table.counts is not None, "Markdown was asked for"
    summary, line = _summary(table.counts, [PastJob(each.output).totals(each.input) for each in jobs])
    with clear_file_errors(f"output {folder}"), replacing(folder / "summary.json") as file:
        file.write(json.dumps(summary, indent=2).encode() + b"\n")
    _say([*table.to_lines(), f"read      {folder}: {line}"])


def _rows_options(arguments: argparse.Namespace, config: RunnerConfig, pages: Path) -> RowsOptions:
    """Without a reader and a prompt, the reader is that of the model."""
    given = {name: value for name, value in vars(arguments).items() if name in _OF_ROWS}
    if not given.keys() & {"reader", "prompt", "prompt_file"}:
        from npu_runner.checkpoint.files import resolve_checkpoint

        given["model"] = resolve_checkpoint(config.model, config.revision, with_weights=False)
    return RowsOptions(output=str(pages), **given)


def _lines_of_fonts(num_documents: int) -> Iterable[str]:
    """The scripts that this host cannot render, where there are documents."""
    from npu_runner.prompts.media.pdf_fonts import fonts_of_host

    fonts = fonts_of_host() if num_documents else None
    if fonts is not None and fonts.missing:
        yield (f"fonts     pages with text in fonts that are not embedded fail: no font for {fonts.languages}; apt "
               "install fonts-noto-cjk")


def _summary(counts: PageCounts, stages: Sequence[Totals]) -> tuple[dict[str, Any], str]:
    """The summary, and its words. `stages`: the totals of all runs of each one. The first answers a row for each page.
    """
    # Seconds are of all answers of all runs: those that were replaced are no further pages. Tokens of answers after
    # the last status of a killed run are not recorded, so they are taken for as many as those of the others.
    jobs, answered, seconds, tokens = [each.to_json() for each in stages], stages[0].rows.num_answered, 0.0, 0.0
    for each, job in zip(stages, jobs, strict=True):
        present, recorded = each.rows.num_answered, each.runs.sums("tally").get("num_answered", 0)
        seconds += job["seconds"].get("serve", 0.0) * present / max(1, recorded, present)
        tokens += job["tokens"]["completion"] * present / recorded if recorded else math.nan if present else 0
    pace = round(answered / seconds, 3) if seconds else None
    tokens_per_page = round(tokens / answered, 1) if answered and not math.isnan(tokens) else None
    num_whole = counts.num_documents - counts.num_with_gaps
    words = "" if pace is None else f"; {pace:g} pages/s"
    words += "" if tokens_per_page is None else f", {tokens_per_page:g} tokens per page"
    return {
        "documents": {"total": counts.num_documents, "whole": num_whole, "with_gaps": counts.num_with_gaps},
        "pages": {"total": counts.num_pages, **dict(sorted(counts.flaws.items()))},
        "pages_per_second": pace, "tokens_per_page": tokens_per_page, "jobs": jobs,
    }, (f"{counts.num_documents} documents, {num_whole} whole, {counts.num_with_gaps} with gaps; {counts.num_pages} "
        f"pages{counts.flaw_words}{words}")


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
