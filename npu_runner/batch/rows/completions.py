"""Reads bodies of /v1/completions and writes their answers: raw prompts, continued. Knows nothing of files or chats.

One row is one prompt, text or token ids. Control tokens in it are control tokens, and no chat template is applied.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag

from npu_runner.batch.rows.endpoint import AnswerForm, PromptProcessor, RequestBody
from npu_runner.batch.rows.logprobs_json import LOWEST_LOGPROB, LogprobsJson, encoded, opened, to_json
from npu_runner.errors import RequestError
from npu_runner.limits import shown
from npu_runner.multimodal.inputs import PromptInputs
from npu_runner.multimodal.media import MediaRules
from npu_runner.outputs import CompletionOutput, PositionLogprobs, TokenLogprob
from npu_runner.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's, and vLLM's, for this endpoint alone


def _tag_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    is_ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    return "<ids>" if is_ids else None


class CompletionBody(RequestBody):
    """The completion request, as far as it is served. None means: not asked for."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "spaces_between_special_tokens": (True,),
        "stream": (False,),
        "stream_options": (),
        "suffix": ("",),
    }
    instead: ClassVar[Mapping[str, str]] = {
        "best_of": "; ask for n completions with logprobs and choose",
        "suffix": "; write the model's own tokens for filling in the middle into the prompt",
    }

    prompt: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[int], Tag("<ids>")],
        Discriminator(
            _tag_of_prompt,
            custom_error_type="prompt_type",
            custom_error_message="prompt is text or a list of token ids",
        ),
    ]
    echo: bool | None = None
    logprobs: int | None = None

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        super().refuse_unserved(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], (str, list)):
            return
        if len(prompt) > 1:
            message = f"prompt: a list of {len(prompt)} prompts; one row is one prompt, so write a row for each"
            raise RequestError(message, "unsupported_value", "prompt")
        body["prompt"] = prompt[0]

    def most_tokens(self, default: int | None) -> int | None:
        """The endpoint has a default of its own, whatever the checkpoint's is."""
        return super().most_tokens(DEFAULT_MAX_TOKENS)

    def num_logprobs(self) -> int | None:
        if self.logprobs is not None and self.echo:
            message = f"logprobs: {shown(self.logprobs)} with echo would be those of the prompt too, which are not made"
            raise RequestError(message, "unsupported_parameter", "logprobs")
        return self.logprobs

    def prepare(
        self, processor: PromptProcessor, media: MediaRules, params: SamplingParams
    ) -> tuple[PromptInputs, AnswerForm]:
        if self.echo and params.truncate_prompt_tokens is not None:
            message = "echo: of a prompt that truncate_prompt_tokens may cut there is no text; ask for one of them"
            raise RequestError(message, "invalid_value", "echo")
        prompt = processor.from_text(self.prompt, truncate_prompt_tokens=processor.most_prompt_tokens(params))
        text = self.prompt if isinstance(self.prompt, str) else processor.decode(self.prompt) if self.echo else ""
        return prompt, CompletionForm(model=self.model, echo=text if self.echo else "")


@dataclass(frozen=True, kw_only=True)
class CompletionForm(AnswerForm):
    """A text completion."""

    id_prefix: ClassVar[str] = "cmpl-"
    object: ClassVar[str] = "text_completion"

    echo: str = ""
    """What stands in front of the text."""

    def write_choice(
        self, completion: CompletionOutput, row: io.BytesIO, logprobs_json: LogprobsJson, *, splits_reasoning: bool,
        row_digest: str,
    ) -> None:
        row.write(encoded(opened({"index": completion.index, "text": self.echo + completion.text}, "logprobs")))
        if completion.logprobs is None:
            row.write(b"null")
        else:
            _write_logprobs(completion, row)
        row.write(encoded(f',"finish_reason":{to_json(completion.finish_reason)}}}'))


def _write_logprobs(completion: CompletionOutput, row: io.BytesIO) -> None:
    """Four lists side by side; the positions are gone through once for each, so that none of them is held."""
    positions = completion.logprobs or ()
    lists: dict[str, Iterator[Any]] = {
        "tokens": (_name(position.sampled) for position in positions),
        "token_logprobs": (_value(position.sampled) for position in positions),
        "top_logprobs": (_top(position) for position in positions),
        "text_offset": _offsets((position.sampled.token_bytes for position in positions), len(completion.text)),
    }
    for number, (name, values) in enumerate(lists.items()):
        row.write(encoded(f'{"," if number else "{"}{to_json(name)}:['))
        for place, value in enumerate(values):
            row.write(encoded(("," if place else "") + to_json(value)))
        row.write(b"]")
    row.write(b"}")


def _name(token: TokenLogprob) -> str:
    """Its text, or its bytes where these are only a part of a character: these must not all look alike."""
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _value(token: TokenLogprob) -> float:
    is_low = not token.logprob >= LOWEST_LOGPROB or token.logprob == float("inf")  # NaN is not above it, either
    return LOWEST_LOGPROB if is_low else token.logprob


def _top(position: PositionLogprobs) -> dict[str, float]:
    """By text; where two tokens have the same, the more probable one counts. The sampled one is always there."""
    top: dict[str, float] = {}
    for token in (*position.top, position.sampled):
        top.setdefault(_name(token), _value(token))
    return top


def _offsets(tokens: Iterator[bytes], num_chars: int) -> Iterator[int]:
    """Where in the text each token begins: behind the characters that those before it have completed."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset = 0
    for token in tokens:
        yield min(offset, num_chars)
        offset += len(decoder.decode(token))
