"""`npu-runner generate`: one question, one answer on standard output. Knows nothing of batches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_runner.config import RunnerConfig, flat_values
from npu_runner.errors import ConfigError, GenerationError
from npu_runner.request.sampling_params import SamplingParams


def answer_question(config: RunnerConfig, question: str, seen: Sequence[tuple[str, str]], *, system: str | None,
                    max_tokens: int | None, temperature: float) -> str:
    """Load the model and answer. `seen`: ("image" or "video", its file), in the order in which they are shown.

    Raises ConfigError for a file that cannot be read, RequestError for an image, a video or a question that cannot be
    served, and GenerationError where the model gives no whole answer. What it thinks first goes to standard error.
    """
    asked: dict[str, Any] = {"temperature": temperature, **({} if max_tokens is None else {"max_tokens": max_tokens})}
    SamplingParams(**asked)  # a mistake answers before anything is loaded
    conversation = _conversation(question, [(kind, _read(kind, file)) for kind, file in seen], system)
    # Only the answer belongs on standard output; what loading prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        from npu_runner.llm import LLM  # torch comes with it: not before the arguments are known to be good

        with LLM(**flat_values(config)) as llm:
            params = SamplingParams(**{**llm.engine.generation_defaults, **asked})
            (result,) = llm.chat(conversation, params, use_tqdm=False)
    if result.finish_reason not in ("stop", "length"):
        reason = result.error or f"finish_reason is {result.finish_reason}"
        raise GenerationError(f"no answer, given up after {len(result.token_ids)} tokens: {reason}")
    if result.reasoning_content is not None:
        print(result.reasoning_content, file=sys.stderr)
    if not result.text:
        what, remedy = "without text", ""
        if result.reasoning_content is not None:
            what = "of reasoning alone"
            remedy = '; raise --max-tokens, or try --chat-template-kwargs \'{"enable_thinking": false}\''
        raise GenerationError(f"no answer: {len(result.token_ids)} tokens {what} (finish_reason "
                              f"{result.finish_reason}){remedy}")
    return result.text


def _read(kind: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{kind} {file}: {error.strerror}") from error


def _conversation(question: str, seen: Sequence[tuple[str, bytes]], system: str | None) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": kind, kind: data} for kind, data in seen]
    content.append({"type": "text", "text": question})
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content}]
