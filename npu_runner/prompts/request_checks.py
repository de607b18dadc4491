"""Checks requests against the task that a model was loaded for. Knows no checkpoint's files and no prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import overload

from tokenizers import Tokenizer

from npu_runner.checkpoint.model_config import ClassPooling, PoolingConfig, ScorePooling, VectorPooling
from npu_runner.errors import RequestError
from npu_runner.grammars.compile import check_side_by_side, with_grammar, with_room
from npu_runner.prompts.text.tokenizer import TextLength, resolve_sampling
from npu_runner.prompts.vision_prompts import not_cut
from npu_runner.request.limits import check_logprobs, check_prompt_logprobs, field_error, shown
from npu_runner.request.pooling_params import CLASSIFY, LABELS, TOKEN_EMBED, Classes, PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs, ReasoningTokens
from npu_runner.request.sampling_params import SamplingParams, num_top_logprobs
from npu_runner.request.structured_outputs import StructuredOutputsParams

GENERATE = "generate"

_LOADED_FOR = {
    GENERATE: "the model generates text and was loaded for that",
    "embed": "the model was loaded for vectors (/v1/embeddings, LLM.embed)",
    "score": "the model was loaded for scores (/v1/score, /v1/rerank, LLM.score)",
    CLASSIFY: "the model was loaded for classes (/v1/classify, LLM.classify), and has a head for nothing else",
}
_NEEDS = {
    GENERATE: "it generates no text so; load it with runner generate (--runner generate)",
    "embed": "a vector needs a checkpoint whose modules.json says how it is pooled, or runner pooling (--runner "
             "pooling)",
    "score": "a score needs a checkpoint whose modules.json has a LogitScore, or task score (--task score)",
    CLASSIFY: "classes need a checkpoint whose architectures name a *ForSequenceClassification",
    TOKEN_EMBED: "states of all tokens need runner pooling (--runner pooling)",
}
"""The remedy for a request for a task, if the model was loaded for another."""


def task_of(pooling: PoolingConfig | None) -> str:
    """The task of a model with this pooling."""
    return GENERATE if pooling is None else pooling.task


def wrong_task(loaded: str, requested: str) -> RequestError:
    """The error of a request for `requested` where the model is loaded for `loaded`."""
    needed = "take the checkpoint that it was made of" if loaded == CLASSIFY else _NEEDS[requested]
    return RequestError(f"{_LOADED_FOR[loaded]}: {needed}", "wrong_endpoint")


def check_pooling_params(params: PoolingParams, pooling: PoolingConfig | None, hidden_size: int | None) -> None:
    """Raises RequestError for what the model does not give. `hidden_size`: None, if it is not known."""
    if params.labels is not None:
        _check_labels(pooling)
        return
    if pooling is None:
        raise _no_labels(f"{_NEEDS[VectorPooling.task]}; {_NEEDS[CLASSIFY]}")
    if params.keeps_tokens:
        return
    if isinstance(pooling, VectorPooling):
        if params.use_activation is False:
            raise _refusal("use_activation", "the checkpoint's modules.json says whether vectors are normalised")
        _check_dimensions(params.dimensions, pooling, hidden_size)
    elif params.dimensions is not None:
        raise _refusal("dimensions", f"they are for vectors, and the model is loaded for task {pooling.task}")


def _no_labels(without: str) -> RequestError:
    return field_error("labels", "missing; the model generates text, and chooses from labels that a request names. "
                       f"Without them, {without}", "missing_required_parameter")


def _check_labels(pooling: PoolingConfig | None) -> None:
    """Raises RequestError where the model does not generate text."""
    if isinstance(pooling, ClassPooling):
        raise field_error("labels", "the model is a classifier, which has labels of its own; leave them out",
                          "invalid_value")
    if pooling is not None:
        raise wrong_task(pooling.task, GENERATE)


def _check_dimensions(dimensions: int | None, pooling: VectorPooling, hidden_size: int | None) -> None:
    served = pooling.dimensions
    if dimensions is None:
        return
    if served is not None and dimensions not in served:
        named = ", ".join(map(str, served))
        raise _refusal("dimensions", f"{dimensions} is none of those the checkpoint names, {named}")
    if hidden_size is not None and dimensions > hidden_size:
        raise _refusal("dimensions", f"{dimensions} is more than the vector has, which is {hidden_size}")


def _refusal(name: str, why: str) -> RequestError:
    return field_error(name, f"{why}", "invalid_pooling_parameter")


class RequestChecks(ABC):
    """Checks params of requests for one model. A subclass that knows the model sets the fields."""

    tokenizer: Tokenizer
    pooling: PoolingConfig | None
    """None: it generates text."""
    max_model_len: int
    """The engine's may be shorter, where memory is."""
    max_logprobs: int
    """Most log probabilities of one request."""
    hidden_size: int | None
    vocab_size: int | None
    reasoning_tokens: ReasoningTokens | None
    """Answers to conversations are split at them; None: they stay as they are."""
    _text_length: TextLength
    _why_no_scores: str | None

    def most_prompt_tokens(self, params: SamplingParams | PoolingParams) -> int | None:
        """The most tokens of a prompt by its `truncate_prompt_tokens`; None: no limit. Raises RequestError for more
        than the model accepts."""
        name, requested = "truncate_prompt_tokens", params.truncate_prompt_tokens
        if requested is None:
            return None
        most = self.max_model_len - (params.max_tokens or 1)
        if requested > self.max_model_len or (requested == -1 and most < 1):
            raise field_error(name, f"{requested} with max_tokens {params.max_tokens} leaves no prompt that fits into "
                              f"the model's {self.max_model_len} tokens (max_model_len)", "invalid_sampling_parameter")
        return most if requested == -1 else requested

    def check_length(self, prompt: PromptInputs, params: SamplingParams | PoolingParams) -> None:
        """Raises RequestError for a prompt that was prepared without the requested truncation, or is too long for its
        prompt_logprobs."""
        if isinstance(params, SamplingParams):
            check_prompt_logprobs(len(prompt.token_ids), self._num_top(params.prompt_logprobs), self.max_logprobs)
        elif params.label_token_ids is not None:
            self._check_before_labels(prompt, params)
        most = self.most_prompt_tokens(params)
        if most is not None and len(prompt.token_ids) > most:
            raise not_cut(len(prompt.token_ids), most, "was prepared without it")

    def _check_before_labels(self, prompt: PromptInputs, params: PoolingParams) -> None:
        """Raises RequestError for a prompt that no label can follow."""
        room = self.max_model_len - params.max_tokens
        if len(prompt.token_ids) > room:
            raise field_error("labels", f"the longest has {params.max_tokens - 1} tokens, which leaves {max(room, 0)} "
                              f"of {self.max_model_len} (max_model_len) for the prompt, and it has "
                              f"{len(prompt.token_ids)}", "prompt_too_long")
        if prompt.thinking == "open":
            raise field_error("labels", "the prompt ends within the reasoning, so no label follows it; set "
                              'chat_template_kwargs {"enable_thinking": false}, or end the reasoning in the messages',
                              "reasoning_open")

    def check_thinking(self, prompt: PromptInputs, params: SamplingParams) -> None:
        """Raises RequestError for a thinking budget that nothing would come of."""
        if params.max_thinking_tokens is not None and prompt.thinking is None:
            raise field_error("max_thinking_tokens", "a raw prompt does not say where reasoning begins; ask in a chat",
                              "unsupported_parameter")

    def check_can_think(self) -> None:
        """Raises RequestError where a thinking budget would limit nothing."""
        if self.reasoning_tokens is None:
            raise field_error("max_thinking_tokens", "this model has no end-of-thinking token, or reasoning_parser is "
                              "none; leave it out", "unsupported_parameter")

    def _different_labels(self, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each label by itself. Raises RequestError if one has none, or those of another one: a
        tokenizer may normalise texts."""
        seen: dict[tuple[int, ...], int] = {}
        for number, label in enumerate(labels):
            name, token_ids = f"labels[{number}]", tuple(self.encode_plainly(label))
            if not token_ids:
                raise field_error(name, f"{shown(label)} has no token of this model", "invalid_value")
            if (first := seen.setdefault(token_ids, number)) != number:
                raise field_error(name, f"{shown(label)} has the same tokens as labels[{first}], so nothing tells them "
                                  "apart; leave one of them out", "invalid_value")
        return tuple(seen)

    @abstractmethod
    def encode_plainly(self, text: str) -> list[int]:
        """Token ids of a text by itself, in which nothing is a control token."""

    @property
    def task(self) -> str:
        """The task that the model was loaded for."""
        return task_of(self.pooling)

    @property
    def classes(self) -> Classes:
        """The classes of the model. Raises RequestError if it was not loaded as a classifier."""
        if not isinstance(self.pooling, ClassPooling):
            raise wrong_task(self.task, CLASSIFY)
        return self.pooling.classes

    def check_task(self, requested: str) -> None:
        """Raises RequestError where a request is for something else than the model is loaded for. States of all tokens
        are there whatever it pools."""
        has_states = requested == TOKEN_EMBED and self.pooling is not None
        if requested == LABELS:
            _check_labels(self.pooling)
        elif requested == CLASSIFY and self.pooling is None:
            raise _no_labels(_NEEDS[CLASSIFY])
        elif requested == ScorePooling.task and isinstance(self.pooling, ClassPooling):
            if self._why_no_scores is not None:
                raise RequestError(f"the model was loaded for classes: {self._why_no_scores}", "wrong_endpoint")
        elif requested != self.task and not has_states:
            raise wrong_task(self.task, requested)

    def check_rules(self, params: Iterable[object]) -> None:
        """Check the rules for answers of many requests, several at once; `resolve_params` finds what came of it."""
        rules = (one.structured_outputs for one in params if isinstance(one, SamplingParams))
        different = {id(rule): rule for rule in rules if isinstance(rule, StructuredOutputsParams)}
        check_side_by_side(list(different.values()))

    def _num_top(self, asked: int | None) -> int | None:
        return None if asked is None else num_top_logprobs(asked, self.vocab_size or self.tokenizer.get_vocab_size())

    @overload
    def resolve_params(self, params: SamplingParams) -> SamplingParams: ...
    @overload
    def resolve_params(self, params: PoolingParams) -> PoolingParams: ...
    def resolve_params(self, params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
        """`params` as the engine takes them: bad words as token ids, structured_outputs as a grammar. Rows are resolved
        in their worker, prompts of `LLM` where they are read; the engine takes nothing else.

        Raises RequestError for token ids that the model lacks, and for more log probabilities than an answer may hold.
        The same for a schema, expression or grammar that cannot be served or forces too long a text, and for params
        that the model was not loaded for.
        """
        if isinstance(params, PoolingParams):
            check_pooling_params(params, self.pooling, self.hidden_size)
            if params.labels is None:
                return params
            return params.replace(label_token_ids=self._different_labels(params.labels))
        self.check_task(GENERATE)
        check_logprobs(params.n, params.max_tokens or self.max_model_len, self._num_top(params.logprobs),
                       self.max_logprobs)

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        if params.max_thinking_tokens is not None:
            self.check_can_think()
        params = resolve_sampling(params, encode, self.vocab_size)
        structured = params.structured_outputs
        if not isinstance(structured, StructuredOutputsParams):
            return params
        fitting = with_room(with_grammar(structured), encode, self._text_length)
        return params if fitting is structured else params.replace(structured_outputs=fitting)
