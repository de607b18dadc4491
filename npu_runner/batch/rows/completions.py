"""Reads bodies of /v1/completions and writes their answers: raw prompts, continued. Knows nothing of files or chats.

One row is one prompt, text or token ids. Control tokens in it are control tokens, and no chat template is applied.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Tag

from npu_runner.batch.rows.endpoint import AnswerForm, AnswerRow, RequestBody, TextForm, Unserved, by_tag, items_tag
from npu_runner.batch.rows.logprobs_json import finite, opened, to_json, write_prompt_logprobs
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import shown
from npu_runner.request.logprobs import Logprob, PromptLogprobs
from npu_runner.request.outputs import CompletionOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams


class CompletionBody(RequestBody):
    """The completion request, as far as it is served. None: the row does not set the field."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "best_of": Unserved(1, instead="ask for n completions with logprobs and choose"),
        "mm_processor_kwargs": Unserved({}, instead="a prompt of this endpoint has no videos, send them in messages to "
                                        "/v1/chat/completions"),
        "multi_modal_data": Unserved({}, instead="images and videos go in messages to /v1/chat/completions"),
        "spaces_between_special_tokens": Unserved(True), "stream": Unserved(False), "stream_options": Unserved(),
        "suffix": Unserved("", instead="write the model's own tokens for filling in the middle into the prompt")}

    prompt: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[list[int], Tag("<list of int>")],
        by_tag(items_tag, "prompt_type", "prompt is text or a list of token ids"),
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

    def default_max_tokens(self, defaults: Mapping[str, Any]) -> int | None:
        """The endpoint has a default of its own, and ignores the checkpoint's."""
        return DEFAULT_MAX_TOKENS

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """With echo the prompt's log probabilities stand before the completion's, as OpenAI had it."""
        if not self._echoes_logprobs:
            return self.prompt_logprobs
        if self.prompt_logprobs not in (None, self.logprobs):
            message = (f"prompt_logprobs: {shown(self.prompt_logprobs)}, and echo with logprobs {shown(self.logprobs)} "
                       "gives that number; ask for one of them")
            raise RequestError(message, "invalid_value", "prompt_logprobs")
        return self.logprobs

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def prepare(self, processor: ChatProcessor, media: MediaRules,
                params: SamplingParams) -> tuple[PromptInputs, AnswerForm]:
        if self.echo and params.truncate_prompt_tokens is not None:
            message = "echo: of a prompt that truncate_prompt_tokens may cut there is no text; ask for one of them"
            raise RequestError(message, "invalid_value", "echo")
        prompt = processor.from_text(self.prompt, truncate_prompt_tokens=processor.most_prompt_tokens(params))
        text = self.prompt if isinstance(self.prompt, str) else processor.decode(self.prompt) if self.echo else ""
        return prompt, CompletionForm(
            model=self.model, echo=text if self.echo else "", echoes_logprobs=self._echoes_logprobs,
            has_prompt_logprobs=self.prompt_logprobs is not None)


@dataclass(frozen=True, kw_only=True)
class CompletionForm(TextForm):
    id_prefix: ClassVar[str] = "cmpl-"
    object: ClassVar[str] = "text_completion"
    item_name: ClassVar[str] = "text"

    echo: str = ""
    """The text in front of the completion's."""
    echoes_logprobs: bool = False
    """The log probabilities of the prompt stand in front of the completion's."""
    has_prompt_logprobs: bool = False
    """The log probabilities of the prompt stand in a member of their own, as vLLM has them."""

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        row.write(opened({"index": completion.index, "text": self.echo + completion.text}, "logprobs"))
        if completion.logprobs is None:
            row.write("null")
        else:
            echoed = row.prompt_logprobs if self.echoes_logprobs else None
            _write_logprobs(completion, row, echoed, len(completion.text) + (len(self.echo) if echoed else 0))
        if self.has_prompt_logprobs and row.prompt_logprobs is not None:
            row.write(",")
            write_prompt_logprobs(row.prompt_logprobs, row.out)
        row.write_end(completion, completion.finish_reason)

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return item["text"] or ""

    @classmethod
    def logprobs_of(cls, logprobs: Mapping[str, Any], num_prompt_tokens: int | None) -> Sequence[float]:
        values: Sequence[float] = logprobs["token_logprobs"]
        # The first token of an echoed prompt has no log probability.
        return values[num_prompt_tokens:] if values and values[0] is None else values


def _tokens(completion: CompletionOutput,
            prompt_logprobs: PromptLogprobs | None) -> Iterator[tuple[Logprob, tuple[Logprob, ...] | None]]:
    """Each token and the most probable ones in its place, None where there is no log probability."""
    if prompt_logprobs is not None:
        yield prompt_logprobs.first_token(), None
        yield from ((place.token, place.top) for place in prompt_logprobs if place is not None)
    for position in completion.logprobs or ():
        yield position.sampled, position.top


def _write_logprobs(completion: CompletionOutput, row: AnswerRow, prompt_logprobs: PromptLogprobs | None,
                    num_chars: int) -> None:
    """Four lists side by side; the tokens are gone through once for each, so that none of them is held."""
    tokens = functools.partial(_tokens, completion, prompt_logprobs)
    lists: dict[str, Iterator[Any]] = {
        "tokens": (_name(token) for token, _ in tokens()),
        "token_logprobs": (None if top is None else finite(token.logprob) for token, top in tokens()),
        "top_logprobs": (None if top is None else _top(token, top) for token, top in tokens()),
        "text_offset": _offsets((token.token_bytes for token, _ in tokens()), num_chars),
    }
    for number, (name, values) in enumerate(lists.items()):
        row.write(f'{"," if number else "{"}{to_json(name)}:[')
        for place, value in enumerate(values):
            row.write(("," if place else "") + to_json(value))
        row.write("]")
    row.write("}")


def _name(token: Logprob) -> str:
    """Its text, or its bytes where these are only a part of a character: these must not all look alike."""
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _top(own: Logprob, most_probable: tuple[Logprob, ...]) -> dict[str, float]:
    """By text; where two tokens have the same, the more probable one counts. The token itself is always there."""
    top: dict[str, float] = {}
    for token in (*most_probable, own):
        top.setdefault(_name(token), finite(token.logprob))
    return top


def _offsets(tokens: Iterator[bytes], num_chars: int) -> Iterator[int]:
    """The place of each token in the text: behind the characters that earlier tokens have completed."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset = 0
    for token in tokens:
        yield min(offset, num_chars)
        offset += len(decoder.decode(token))
