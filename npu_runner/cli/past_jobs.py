"""`npu-runner summary` and `npu-runner report`: a job is looked at through its files. Knows nothing of these files.

Imports what reads them only when a command runs: --help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from npu_runner.batch.job.options import BatchOptions

_OUTPUT = "the output of a job, which may be at work"


def add_summary_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("-i", "--input", metavar="FILE",
                        help="the input of the job, to count its rows (default: the last run's count)")
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.set_defaults(run=_summary)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("-o", "--page", metavar="PAGE", required=True, help="the HTML file; - writes standard output")
    parser.add_argument("-i", "--input", metavar="FILE",
                        help="the input of the job (default: none, and the page shows answers without questions)")
    parser.add_argument("--allowed-media-dir", type=Path, metavar="PATH",
                        help="the folder of the job's images and videos (default: only data: URLs are shown)")
    parser.add_argument("--report-rows", type=int, metavar="N", default=BatchOptions.report_rows,
                        help=f"most rows on the page (default: {BatchOptions.report_rows})")
    parser.set_defaults(run=_report)


def _summary(arguments: argparse.Namespace) -> int:
    from npu_runner.batch.job.past_job import PastJob

    totals = PastJob(arguments.output).totals(arguments.input)
    print(json.dumps(totals.to_json(), indent=2) if arguments.json else "\n".join(totals.to_lines()))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from npu_runner.batch.job.past_job import NO_INPUT, PastJob

    job = PastJob(arguments.output)
    job.report(BatchOptions(
        input=arguments.input or NO_INPUT, output=arguments.output, report=Path(arguments.page),
        allowed_media_dir=arguments.allowed_media_dir, report_rows=arguments.report_rows,
    ))  # fmt: skip
    print(f"report    {arguments.page}: {job.totals(None).to_lines()[0]}", file=sys.stderr)
    return 0
