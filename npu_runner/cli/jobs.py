"""The commands of a job: batch runs it; status, summary and report look at it from outside.

Turns their options into settings. Knows nothing of rows or models.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.options import add_model_options, add_options, read_model_settings
from npu_runner.cli.parser import Commands, add_command, print_result

EXIT_STATUSES = """\
exit status:
  0  every row has an answer
  3  finished, but some rows failed; --retry-errors tries them again
  1  the job ended early (a signal, a dead process, a full disk); the same command goes on where it stopped
  2  a wrong option or setting; nothing was begun
  4  the job ended early because more rows failed than --max-failures allows; finished rows are kept
"""
_OUTPUT = "the output of a job, which may be at work"


def add_batch(commands: Commands) -> None:
    parser = add_command(
        commands, "batch", _batch, "answer a JSONL file of requests",
        "Answers every row of a file in OpenAI's batch format. Run again, it goes on where it stopped.",
        epilog=EXIT_STATUSES)
    add_options(parser, BatchOptions, "job")
    add_model_options(parser)


def _batch(arguments: argparse.Namespace) -> int:
    config, options = read_model_settings(arguments, BatchOptions)
    from npu_runner.reports.report import run_batch_and_report

    return run_batch_and_report(config, options).exit_status


def add_status(commands: Commands) -> None:
    parser = add_command(
        commands, "status", _status, "say how far a job is, from another terminal",
        "Says of a job under way how many rows are done, how fast, how long still, and of one that has "
        "ended how. Takes no lock, changes nothing and loads no model.")
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _status(arguments: argparse.Namespace) -> int:
    from npu_runner.reports.status import status_of

    status = status_of(arguments.output)
    print_result(arguments, status.to_json(), status.to_lines())
    return 0


def add_summary(commands: Commands) -> None:
    parser = add_command(
        commands, "summary", _summary, "add up all runs of a job, finished or under way",
        "Counts the rows of an output, and adds up what the runs of its job took. Loads no model.")
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("-i", "--input", metavar="FILE",
                        help="the rows that the job answers, to count them (default: the last run's count)")
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")


def _summary(arguments: argparse.Namespace) -> int:
    from npu_runner.reports.summary import PastJob

    totals = PastJob(arguments.output).totals(arguments.input)
    print_result(arguments, totals.to_json(), totals.to_lines())
    return 0


def add_report(commands: Commands) -> None:
    parser = add_command(
        commands, "report", _report, "make an HTML page of a job's answers",
        "Makes what batch --report makes, from the files of a job. Loads no model.")
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("-o", "--page", metavar="PAGE", required=True,
                        help="the HTML file; - writes standard output")
    parser.add_argument("-i", "--input", metavar="FILE",
                        help="the rows that the job answers (default: none, and answers are shown without questions)")
    parser.add_argument("--allowed-media-dir", type=Path, metavar="PATH",
                        help="the folder of the job's images and videos (default: only data: URLs are shown)")
    parser.add_argument("--report-rows", type=int, metavar="N", default=BatchOptions.report_rows,
                        help=f"most rows that are shown, some of each kind (default: {BatchOptions.report_rows})")


def _report(arguments: argparse.Namespace) -> int:
    from npu_runner.reports.priority import give_way_to_job

    give_way_to_job(arguments.output)  # before the imports below, which take a second
    from npu_runner.reports.report import report_job
    from npu_runner.reports.summary import NO_INPUT

    print(report_job(BatchOptions(
        input=arguments.input or NO_INPUT, output=arguments.output, report=Path(arguments.page),
        allowed_media_dir=arguments.allowed_media_dir, report_rows=arguments.report_rows)), file=sys.stderr)
    return 0
