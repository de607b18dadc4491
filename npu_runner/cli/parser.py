"""The parser of every command: help in two levels, examples, and the nearest name for a mistake.

Knows which options a first user needs, and nothing of what they mean: the words are those of the settings.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

Commands: typing.TypeAlias = "argparse._SubParsersAction[Parser]"

FIRST: dict[str, tuple[str, ...]] = {
    "rows": ("sources", "output", "prompt", "template", "image", "schema", "max_tokens", "id", "keep", "reader",
             "media_dir", "sample"),
    "read": ("sources", "output", "model", "reader", "prompt", "pages", "sample", "retry", "platform",
             "data_parallel_size", "tensor_parallel_size"),
    "batch": ("input", "output", "model", "allowed_media_dir", "response_schema", "retry", "overwrite",
              "report", "platform", "data_parallel_size", "tensor_parallel_size", "max_model_len"),
    "check": ("input", "model", "allowed_media_dir", "response_schema", "sample", "device_memory", "platform",
              "input_price", "output_price", "max_model_len", "json"),
    "verify": ("rows", "num", "max_tokens", "model", "allowed_media_dir", "platform", "tensor_parallel_size",
               "max_model_len", "json"),
    "generate": ("question", "seen", "model", "system", "max_tokens", "temperature", "platform",
                 "tensor_parallel_size", "max_model_len", "chat_template_kwargs"),
    "doctor": ("platform", "tensor_parallel_size", "graph_mode", "skip_generation", "json", "fits", "device_memory",
               "max_model_len", "max_num_seqs"),
}
"""The options that --help of a command shows; --help-all shows all. Commands that are not here are short."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "rows": (
        ('rows photos --prompt "What is this?" -o rows.jsonl', "ask the same of every image below photos"),
        ("rows items.csv --image photo --template question.txt --id sku --keep price -o rows.jsonl",
         "ask what the template says of each record of a CSV, whose column photo names an image"),
        ('rows photos --prompt "Read the receipt." --schema receipt.json --max-tokens 500 -o rows.jsonl',
         "ask for JSON that fits a schema"),
    ),
    "read": (
        ("read reports -o out --model chandra-ocr-2 --reader chandra-ocr-2", "write a Markdown file of each document; "
         "the same command adds new documents, and goes on where it stopped"),
        ("read reports -o out --model Qwen3-VL-8B --prompt 'Write this page as Markdown.' --sample 20",
         "try a prompt with 20 pages"),
        ("read scans -o out --model MinerU2.5 --pages 1-5", "read the first pages, by the reader of the model"),
    ),
    "batch": (
        ("batch -i rows.jsonl -o answers.jsonl --model Qwen3-VL-8B --allowed-media-dir photos",
         "answer the rows; the same command resumes a job that was killed"),
        ("batch -i rows.jsonl -o answers.jsonl --model Qwen3-VL-8B --allowed-media-dir photos "
         "--retry errors,cut_off", "try failed rows and cut-off answers again"),
        ("batch -i rows.jsonl -o answers.jsonl --model Qwen3-VL-8B --data-parallel-size auto --report report.html",
         "use every device of this host, and make a page of the answers"),
    ),
    "check": (
        ("check -i rows.jsonl --model Qwen3-VL-8B --allowed-media-dir photos", "name the rows that would fail"),
        ("check -i rows.jsonl --model Qwen3-VL-8B --device-memory 64G", "say whether the model fits a device as well"),
        ("check -i rows.jsonl --model Qwen3-VL-8B --sample 512 --output-price 2",
         "answer 512 of the rows, and say how long the job would take and what it would cost"),
    ),
    "verify": (
        ("verify --rows rows.jsonl --model Qwen3-VL-8B --allowed-media-dir photos",
         "compare 20 answers with transformers on this host"),
        ("verify --rows rows.jsonl --model Qwen3-8B --num 200 --json found.json", "compare more, for a program"),
        ("verify --rows rows.jsonl --model Qwen3-8B --dtype float32 --platform cpu", "see how close float32 comes"),
    ),
    "table": (
        ("table answers.jsonl -i rows.jsonl -o table.parquet", "metadata, text, and a column for each field of JSON"),
        ("table answers.jsonl -o vectors.npy", "the vectors of an embedding model"),
        ("table answers.jsonl -i pages.jsonl --markdown OUT", "a Markdown file of each document"),
    ),
    "merge": (("merge first.jsonl second.jsonl -o all.jsonl --dropped rest.jsonl", "each row once"),),
    "generate": (
        ('generate --model Qwen3-VL-8B --image cat.jpg "What is this?"', "ask about an image"),
        ('generate --model Qwen3-8B --max-tokens 200 --system "Answer in French." "What is a cat?"',
         "ask without an image"),
        ('generate --model Qwen3-VL-8B --video film.mp4 --tensor-parallel-size 2 "What happens?"',
         "ask about a video, on two devices"),
    ),
    "status": (("status answers.jsonl", "ask from another terminal how far the job is"),),
    "summary": (("summary answers.jsonl -i rows.jsonl --json", "add up all runs of a job, for a program"),),
    "report": (("report answers.jsonl -i rows.jsonl -o page.html --allowed-media-dir photos",
                "show questions, images and answers"),),
    "models": (("models", "list what is served"), ("models Qwen3-VL-8B", "say how this checkpoint would be served"),
               ("models --reader chandra-ocr-2", "show what this page reader asks")),
    "doctor": (
        ("doctor", "look at this host, and answer a few questions with the embedded model"),
        ("doctor --platform npu --skip-generation --json", "check the NPUs in seconds, for a program"),
        ("doctor --fits Qwen3-VL-8B --device-memory 64G", "say whether a model fits a device of 64 GiB"),
    ),
}

_INSTEAD = {
    "serve": "there is no server: write an OpenAI client's messages as rows, and answer them with npu-runner batch",
    "run-batch": "npu-runner batch -i ROWS -o ANSWERS answers a file in OpenAI's batch format",
    "chat": "npu-runner generate QUESTION asks one question through the chat template",
    "complete": "rows of /v1/completions hold raw prompts, which npu-runner batch continues",
    "bench": "in a checkout, python -m bench.device and python -m bench.cpu measure",
    "collect-env": "npu-runner doctor looks at this host",
}
"""Commands of vLLM, and their counterparts here."""
_OPTIONS_INSTEAD = {"--input-file": "--input", "--output-file": "--output"}
_REMOVED = {"--report-every": "it was removed; npu-runner report works beside a running job"}
"""Options of earlier releases, and what to do instead."""


class Parser(argparse.ArgumentParser):
    """A command's parser, or the outermost. A mistake names the nearest names, and does not print all options."""

    first: Collection[str] = ()
    """The options and arguments that --help shows, by name; empty: all."""
    examples: Sequence[tuple[str, str]] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:
            self._refuse_unknown_option(words)
        else:
            self._refuse_unknown_command(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown_option(next((word for word in unknown if word.startswith("-")), unknown[0])))
        return parsed, unknown

    def _refuse_unknown_option(self, words: Sequence[str]) -> None:
        """Before argparse says which needed options are missing: a wrong name may stand for one of them."""
        before = words[:words.index("--")] if "--" in words else words
        for word in before:
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                self.error(self._unknown_option(name))

    def _unknown_option(self, word: str) -> str:
        name = word.partition("=")[0]
        if name in _REMOVED:
            return f"{name}: {_REMOVED[name]}"
        options = {option.lstrip("-"): option for option in self._option_string_actions}  # dashes are alike in all
        near = [options[each] for each in difflib.get_close_matches(name.lstrip("-"), options, n=3, cutoff=0.62)]
        if _OPTIONS_INSTEAD.get(name) in self._option_string_actions:
            near = [_OPTIONS_INSTEAD[name]]
        return f"{name} is no option of it" + (f"; did you mean {', '.join(near)}?" if near else "")

    def _refuse_unknown_command(self, words: Sequence[str]) -> None:
        known = self._subparsers._group_actions[0].choices if self._subparsers is not None else None
        name = next((word for word in words if not word.startswith("-")), None)
        if name is None or known is None or name in known:
            return
        instead = _INSTEAD.get(name.replace("_", "-"))
        near = difflib.get_close_matches(name, [str(each) for each in known], n=1)
        remedy = instead or (f"did you mean {near[0]}?" if near else f"the commands are {', '.join(map(str, known))}")
        self.error(f"{name!r} is no command; {remedy}")

    def format_help(self) -> str:
        """The options that a first user needs."""
        return self._help(self.first)

    def _help(self, first: Collection[str]) -> str:
        """`first`: the options to show, by name; empty: all."""
        formatter = self._get_formatter()
        arguments = [f"{action.metavar or action.dest}" for action in self._actions
                     if not action.option_strings and action.help != argparse.SUPPRESS]
        formatter.add_usage(" ".join(["%(prog)s", *arguments, "[options]"]), [], [])
        formatter.add_text(self.description)
        if first:
            shown = [action for name in first for action in self._actions if action.dest == name]
            for title, is_option in (("arguments", False), ("options", True)):
                formatter.start_section(title)
                formatter.add_arguments([each for each in shown if bool(each.option_strings) == is_option])
                formatter.end_section()
        else:
            for group in self._action_groups:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        num_options = sum(bool(each.option_strings) and each.help != argparse.SUPPRESS for each in self._actions)
        more = f"all {num_options} options: {self.prog} --help-all\n" if first else ""
        return "\n".join(filter(None, (formatter.format_help().rstrip("\n") + "\n", self._examples(), self.epilog,
                                       more)))

    def _examples(self) -> str:
        lines = [f"  {self.prog.partition(' ')[0]} {line}\n      {what}\n" for line, what in self.examples]
        return "examples:\n" + "".join(lines) if lines else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's, with an error of a full device at once and not when Python ends."""
        print(message, end="", file=file or sys.stderr, flush=True)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: {self.prog} [options]; {self.prog} --help lists them\n{self.prog}: error: {message}\n")


class _WholeHelp(argparse.Action):
    def __call__(self, parser: Any, *arguments: Any) -> None:
        parser._print_message(parser._help(()), sys.stdout)
        parser.exit()


def add_command(commands: Commands, name: str, run: Callable[[argparse.Namespace], int], help: str, description: str,
                **more: Any) -> Parser:
    """A command that `run` answers with an exit status. Its options cannot be abbreviated: a new one would change what
    an abbreviation means. `more`: argparse's."""
    parser = commands.add_parser(name, help=help, description=description, allow_abbrev=False, **more)
    parser.first, parser.examples = FIRST.get(name, ()), EXAMPLES[name]
    parser.add_argument("--help-all", action=_WholeHelp, nargs=0, help="show all options, and exit")
    parser.set_defaults(run=run)
    return parser


def print_result(arguments: argparse.Namespace, values: Any, lines: Sequence[str]) -> None:
    """With --json the values, else the lines."""
    print(json.dumps(values, indent=2) if arguments.json else "\n".join(lines))


def accept_old_spelling(parsed: argparse.Namespace, old: str, spelled: str) -> None:
    """The file of rows under its name of the last release: `old` in `parsed` becomes `input`, and a line says so."""
    value = vars(parsed).pop(old, None)
    if value is not None and getattr(parsed, "input", None) is None:
        print(f"npu-runner: {spelled} is the old spelling, which the next release refuses; write -i {value}",
              file=sys.stderr)
        parsed.input = value
