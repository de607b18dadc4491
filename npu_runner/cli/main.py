"""The `npu-runner` command. Puts the commands together and turns errors into exit statuses; the work is elsewhere.

Imports torch only once the arguments are known to be good, so that --help and mistakes answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from npu_runner import __version__
from npu_runner.batch.files.durable import explain_file_error, has_given_out
from npu_runner.cli import check, doctor, generate, jobs, models, read, tables, verify
from npu_runner.cli.parser import EXAMPLES, Commands, Parser
from npu_runner.errors import ConfigError, NpuRunnerError, RequestError, TooManyFailuresError
from npu_runner.processes.log_level import LEVELS, VARIABLE, show_log
from npu_runner.processes.patient_streams import hold_standard_descriptors, patient_stderr, plain_stdout
from npu_runner.threads import wait_briefly

_ADD = (tables.add_rows, jobs.add_batch, check.add, verify.add, tables.add_table, tables.add_merge, read.add,
        generate.add, jobs.add_status, jobs.add_summary, jobs.add_report, models.add, doctor.add)
"""They add one command each, in the order of --help."""


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
        except NpuRunnerError as error:
            is_mistake = isinstance(error, (ConfigError, RequestError))
            return _fail(str(error), 2 if is_mistake else 4 if isinstance(error, TooManyFailuresError) else 1)
        except ModuleNotFoundError as error:
            from npu_runner.platforms.examination import RUNNER_NEEDS

            if error.name not in {"PIL" if name == "pillow" else name for name in RUNNER_NEEDS}:
                raise
            return _fail(f"{error}; npu-runner doctor lists every package that is missing", 2)
        except RuntimeError as error:
            # Torch says so when an accelerator's extension is installed and cannot be loaded; it helps on no platform.
            if "Failed to load the backend extension" not in str(error):
                raise
            return _fail(f"torch does not load ({error.__cause__ or error}); npu-runner doctor says what to do", 2)
        except KeyboardInterrupt:
            return 1
        except BrokenPipeError:
            _redirect_stdout_to_null()  # its reader has gone
            return 1
        except OSError as error:
            if not has_given_out(error):
                raise
            _redirect_stdout_to_null()
            return _fail(str(explain_file_error(error.filename or "standard output", error)), 1)


def _fail(message: str, status: int) -> int:
    print(f"npu-runner: {message}", file=sys.stderr)
    return status


def _redirect_stdout_to_null() -> None:
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
    for add in _ADD:
        add(commands)
    helper = commands.add_parser("help")  # without a help text, it is not in the list
    helper.add_argument("command", nargs="?", choices=list(commands.choices))
    helper.set_defaults(run=lambda arguments: _help(commands.choices.get(arguments.command, parser)))
    for command in commands.choices.values():
        command.add_argument("--log-level", choices=LEVELS, metavar="|".join(LEVELS), help="show what is logged from "
                             f"this level on, of every process of the command (default: ${VARIABLE})")
    return parser


def _help(parser: Parser) -> int:
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
