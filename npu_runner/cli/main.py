"""The `npu-runner` command. Turns options into settings and errors into exit statuses; everything else is elsewhere.

Imports torch only once the arguments are known to be good, so that --help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_runner import __version__
from npu_runner.assets import SHAPES_VL
from npu_runner.batch.files.durable import explain_file_error, has_given_out
from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.check import add_check_arguments
from npu_runner.cli.check import run as run_check
from npu_runner.cli.doctor_options import add_doctor_arguments, refuse_without_fits
from npu_runner.cli.generate import answer_question
from npu_runner.cli.options import add_options, add_some_options, given
from npu_runner.cli.parser import EXAMPLES, Commands, Parser, add_command
from npu_runner.cli.tables import add_merge, add_rows, add_table
from npu_runner.config import RunnerConfig, from_keywords
from npu_runner.errors import ConfigError, NpuRunnerError, RequestError, TooManyFailuresError
from npu_runner.processes.log_level import LEVELS, VARIABLE, show_log
from npu_runner.processes.patient_streams import PlainStream, hold_standard_descriptors, patient_stderr, plain_stdout
from npu_runner.threads import wait_briefly

_EXIT_STATUSES = """\
exit status:
  0  every row has an answer
  3  finished, but some rows failed; --retry-errors tries them again
  1  the job ended early (a signal, a dead process, a full disk); the same command goes on where it stopped
  2  a wrong option or setting; nothing was begun
  4  the job ended early because more rows failed than --max-failures allows; finished rows are kept
"""
_OUTPUT = "the output of a job, which may be at work"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status; argparse itself exits with 2."""
    hold_standard_descriptors()
    with plain_stdout(), patient_stderr():
        try:
            parsed = _parser().parse_args(arguments)
            wait_briefly()
            if getattr(parsed, "log_level", None) is not None:
                os.environ[VARIABLE] = parsed.log_level  # for the processes that this one starts, too
            try:
                show_log()
            except ValueError as error:
                raise ConfigError(str(error)) from error
            status = int(parsed.run(parsed))
            print(end="", flush=True)  # a full device is named here, and not when Python ends
            return status
        except (ConfigError, RequestError) as error:
            print(f"npu-runner: {error}", file=sys.stderr)
            return 2
        except NpuRunnerError as error:
            print(f"npu-runner: {error}", file=sys.stderr)
            return 4 if isinstance(error, TooManyFailuresError) else 1
        except ModuleNotFoundError as error:
            from npu_runner.platforms.examination import RUNNER_NEEDS

            if error.name not in {"PIL" if name == "pillow" else name for name in RUNNER_NEEDS}:
                raise
            print(f"npu-runner: {error}; npu-runner doctor lists every package that is missing", file=sys.stderr)
            return 2
        except RuntimeError as error:
            # Torch says so when an accelerator's extension is installed and cannot be loaded; it helps on no platform.
            if "Failed to load the backend extension" not in str(error):
                raise
            print(f"npu-runner: torch does not load ({error.__cause__ or error}); npu-runner doctor says what to do",
                  file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 1
        except BrokenPipeError:
            _lead_standard_output_to_null()  # its reader has gone
            return 1
        except OSError as error:
            if not has_given_out(error):
                raise
            _lead_standard_output_to_null()
            print(f"npu-runner: {explain_file_error(error.filename or 'standard output', error)}", file=sys.stderr)
            return 1


def _lead_standard_output_to_null() -> None:
    """Else Python complains once more when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parser() -> Parser:
    parser = Parser(
        prog="npu-runner",
        description="Offline multimodal batch inference: a file of requests in, a file of answers out.",
        epilog="npu-runner COMMAND --help shows what a command does, with examples.\n", allow_abbrev=False)
    parser.examples = [EXAMPLES[name][0] for name in ("rows", "batch", "table")]
    parser.add_argument("--version", action="version", version=f"npu-runner {__version__}")
    commands: Commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda arguments: _help(parser))
    add_rows(commands)
    _add_batch(commands)
    _add_check(commands)
    add_table(commands)
    add_merge(commands)
    _add_generate(commands)
    _add_status(commands)
    _add_summary(commands)
    _add_report(commands)
    _add_models(commands)
    _add_doctor(commands)
    of_command = commands.add_parser("help")  # without a help text, it is not in the list
    of_command.add_argument("command", nargs="?", choices=list(commands.choices))
    of_command.set_defaults(run=lambda arguments: _help(commands.choices.get(arguments.command, parser)))
    for command in commands.choices.values():
        command.add_argument("--log-level", choices=LEVELS, metavar="|".join(LEVELS), help="show what is logged from "
                             f"this level on, of every process of the command (default: ${VARIABLE})")
    return parser


def _help(parser: Parser) -> int:
    parser.print_help()
    return 0


def _add_batch(commands: Commands) -> None:
    parser = add_command(
        commands, "batch", _batch, "answer a JSONL file of requests",
        "Answers every row of a file in OpenAI's batch format. Run again, it goes on where it stopped.",
        epilog=_EXIT_STATUSES)
    add_options(parser, BatchOptions, "job")
    _add_model_options(parser)


def _add_check(commands: Commands) -> None:
    parser = add_command(
        commands, "check", _check, "say which rows of a job would fail, before it runs",
        "Prepares every row as a job does, without weights, and says which would fail and how large the "
        "others are. Exit status 0: every row would be served, 3: some would fail, 1: the model does not fit.")
    add_check_arguments(parser)
    _add_model_options(parser)


def _add_generate(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", _generate, "answer one question, with images and videos or without",
        "Answers one question and prints the answer. Exit status 1: the model gave none, or an empty one; "
        "standard error says why.")
    question = parser.add_argument_group("question")
    question.add_argument("question", help="what to ask")
    # One list of both kinds: they are shown in the order in which they are named.
    for kind, what in (("image", "an image"), ("video", "a video (pip install 'av>=17.1')")):
        question.add_argument(f"--{kind}", dest="seen", action="append", default=[], metavar="FILE",
                              type=functools.partial(_of_kind, kind), help=f"{what}; may be repeated")
    question.add_argument("--system", metavar="TEXT", help="instructions that come before the question")
    question.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer")
    question.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    _add_model_options(parser)


def _of_kind(kind: str, file: str) -> tuple[str, str]:
    return kind, file


def _add_status(commands: Commands) -> None:
    parser = add_command(
        commands, "status", _status, "say how far a job is, from another terminal",
        "Says of a job under way how many rows are done, how fast, how long still, and of one that has "
        "ended how. Takes no lock, changes nothing and loads no model.")
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _add_summary(commands: Commands) -> None:
    parser = add_command(
        commands, "summary", _summary, "add up all runs of a job, finished or under way",
        "Counts the rows of an output, and adds up what the runs of its job took. Loads no model.")
    parser.add_argument("output", help=_OUTPUT)
    parser.add_argument("-i", "--input", metavar="FILE",
                        help="the rows that the job answers, to count them (default: the last run's count)")
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")


def _add_report(commands: Commands) -> None:
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


def _add_models(commands: Commands) -> None:
    parser = add_command(
        commands, "models", _models, "list the models that are served, or say whether a checkpoint is",
        "Prints what is served, by model_type. Of a model it says in one line how it would be served, or "
        "why not. Loads no weights and needs no device. Exit status 0: served, 1: not.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a checkpoint folder, a hub id or a bare config.json "
                        "(default: the table of all model types)")
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")
    add_some_options(parser, RunnerConfig, "settings of MODEL", ("revision", "runner", "task"))


def _add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", _doctor, "check whether this host is ready, and name a remedy for each problem",
        "Looks at drivers, versions, devices and variables, then answers questions about drawn images. "
        "Exit status 1: something failed; its remedy is printed.")
    add_doctor_arguments(parser)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    shown = "the embedded shapes-vl, which knows drawn shapes only"
    add_options(parser, RunnerConfig, "model", defaults={"model": (str(SHAPES_VL), shown)})


def _say_who_answers(config: RunnerConfig) -> None:
    """A forgotten --model asks the embedded one, which answers whatever it is shown."""
    if config.model == str(SHAPES_VL):
        print("the embedded shapes-vl answers, which knows drawn shapes only; --model names another one",
              file=sys.stderr)


def _batch(arguments: argparse.Namespace) -> int:
    config, options = from_keywords(given(arguments, RunnerConfig, BatchOptions), RunnerConfig, BatchOptions)
    _say_who_answers(config)
    from npu_runner.reports.report import run_batch_and_report

    return run_batch_and_report(config, options).exit_status


def _check(arguments: argparse.Namespace) -> int:
    (config,) = from_keywords(given(arguments, RunnerConfig), RunnerConfig)
    _say_who_answers(config)
    return run_check(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from npu_runner.reports.status import status_of

    status = status_of(arguments.output)
    print(json.dumps(status.to_json(), indent=2) if arguments.json else "\n".join(status.to_lines()))
    return 0


def _summary(arguments: argparse.Namespace) -> int:
    from npu_runner.reports.summary import PastJob

    totals = PastJob(arguments.output).totals(arguments.input)
    print(json.dumps(totals.to_json(), indent=2) if arguments.json else "\n".join(totals.to_lines()))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from npu_runner.reports.priority import give_way_to_job

    give_way_to_job(arguments.output)  # before the imports below, which take a second
    from npu_runner.reports.report import report_job
    from npu_runner.reports.summary import NO_INPUT

    print(report_job(BatchOptions(
        input=arguments.input or NO_INPUT, output=arguments.output, report=Path(arguments.page),
        allowed_media_dir=arguments.allowed_media_dir, report_rows=arguments.report_rows)), file=sys.stderr)
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from npu_runner.cli.models import run

    return run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.fits is not None:
        from npu_runner.cli.doctor_fits import run as run_fits

        return run_fits(arguments)
    refuse_without_fits(arguments)
    from npu_runner.cli.doctor import run

    return run(arguments)


def _generate(arguments: argparse.Namespace) -> int:
    (config,) = from_keywords(given(arguments, RunnerConfig), RunnerConfig)
    _say_who_answers(config)
    answer = answer_question(
        config, arguments.question, arguments.seen, system=arguments.system,
        max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    assert isinstance(sys.stdout, PlainStream), "main has made it so"
    sys.stdout.write_data(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
