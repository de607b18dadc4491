"""`npu-runner generate`: one question, one answer on standard output. Knows nothing of batches."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_runner.cli.options import add_model_options, read_model_settings
from npu_runner.cli.parser import Commands, add_command
from npu_runner.config import flat_values
from npu_runner.errors import ConfigError, GenerationError
from npu_runner.processes.patient_streams import PlainStream
from npu_runner.request.sampling_params import SamplingParams

_PAGE = re.compile("#page=[0-9]+$")


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", run, "answer one question, with images and videos or without",
        "Answers one question and prints the answer. Exit status 1: the model gave none, or an empty one; "
        "standard error says why.")
    question = parser.add_argument_group("question")
    question.add_argument("question", help="what to ask")
    # One list of both kinds: they are shown in the order in which they are named.
    for kind, what in (("image", "an image, a page as a.pdf#page=3, or an image_url as "
                        '{"url": "a.pdf", "page": 3, "dpi": 200}'), ("video", "a video (pip install 'av>=17.1')")):
        question.add_argument(f"--{kind}", dest="seen", action="append", default=[], metavar="FILE",
                              type=functools.partial(_kind_and_file, kind), help=f"{what}; may be repeated")
    question.add_argument("--pdf-passwords", metavar="FILE", help="JSON file of an object: for the path of a PDF, as "
                          "--image names it, or * for all others, its password")
    question.add_argument("--system", metavar="TEXT", help="instructions that come before the question")
    question.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer")
    question.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    add_model_options(parser)


def _kind_and_file(kind: str, file: str) -> tuple[str, str]:
    return kind, file


def run(arguments: argparse.Namespace) -> int:
    """Print the answer. Raises the errors of `_answer`."""
    (config,) = read_model_settings(arguments)
    options: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    SamplingParams(**options)  # a mistake answers before anything is loaded
    media = [_part(kind, file) for kind, file in arguments.seen]
    settings = {**flat_values(config), "pdf_passwords": arguments.pdf_passwords}
    answer = _answer(settings, _conversation(arguments.question, media, arguments.system), options)
    assert isinstance(sys.stdout, PlainStream), "main has made it so"
    sys.stdout.write_data(answer + "\n")
    return 0


def _answer(settings: dict[str, Any], conversation: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Load the model and answer. `settings`: of LLM, `options`: of SamplingParams.

    Raises RequestError for an image, a video or a question that cannot be served, and GenerationError where the model
    gives no whole answer. Reasoning goes to standard error.
    """
    # Only the answer belongs on standard output; what loading prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        from npu_runner.llm import LLM  # torch comes with it: not before the arguments are known to be good

        with LLM(**settings) as llm:
            params = SamplingParams(**{**llm.engine.generation_defaults, **options})
            (result,) = llm.chat(conversation, params, use_tqdm=False)
    if result.finish_reason not in ("stop", "length"):
        reason = result.error or f"finish_reason is {result.finish_reason}"
        raise GenerationError(f"no answer, given up after {len(result.token_ids)} tokens: {reason}")
    if result.reasoning_content is not None:
        print(result.reasoning_content, file=sys.stderr)
    if not result.text:
        kind, remedy = "without text", ""
        if result.reasoning_content is not None:
            kind = "of reasoning alone"
            remedy = '; raise --max-tokens, or try --chat-template-kwargs \'{"enable_thinking": false}\''
        raise GenerationError(f"no answer: {len(result.token_ids)} tokens {kind} (finish_reason "
                              f"{result.finish_reason}){remedy}")
    return result.text


def _part(kind: str, file: str) -> dict[str, Any]:
    """The part of a message that shows a file. A mistake answers before anything is loaded."""
    if kind == "image" and file.startswith("{"):
        try:
            address = json.loads(file)
            return {"type": "image_url", "image_url": {**address, "url": Path(address["url"])}}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"image {file}: it is no JSON object with a url ({error})") from error
    path = Path(file)
    name = path if path.exists() else Path(_PAGE.sub("", file))
    try:
        if kind == "image" and name.suffix.lower() in (".pdf", ".tif", ".tiff"):
            name.open("rb").close()
            return {"type": "image_url", "image_url": {"url": path}}
        return {"type": kind, kind: path.read_bytes()}
    except OSError as error:
        raise ConfigError(f"{kind} {name}: {error.strerror}") from error


def _conversation(question: str, media: Sequence[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [*media, {"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content}]
