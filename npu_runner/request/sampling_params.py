"""Sampling parameters of a request. Knows nothing of tensors, tokenizers or models."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS, check_count, field_error, shown, size
from npu_runner.request.repetition_detection import RepetitionDetectionParams
from npu_runner.request.structured_outputs import StructuredOutputsParams

MAX_TOP_LOGPROBS = 20
WHOLE_VOCABULARY = -1
"""In the place of a number of most probable tokens: all of them."""
DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI and vLLM for a raw prompt, in /v1/completions and `LLM.generate` only."""

_NOT_SERVED = {
    "best_of": "n answers are generated; choose among them by cumulative_logprob",
    "use_beam_search": "there is no beam search; give n, and choose by cumulative_logprob",
    "length_penalty": "there is no beam search, which it belongs to",
    "early_stopping": "there is no beam search, which it belongs to",
    "guided_decoding": "give structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "logit_bias, bad_words, allowed_token_ids and structured_outputs say what may be generated",
    "output_kind": "results are whole; with stream_results a call gives each as it finishes",
    "spaces_between_special_tokens": "special tokens are left out, or written as the tokenizer has them",
    "extra_args": "there are no plug-ins that would read it",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Decoding settings of one request. Values out of range raise RequestError with the field's name.

    Numbers may be numpy's; they are stored as Python's own. None is the empty list or mapping, and no top_k; -1 is no
    top_k, too.

    The penalties are OpenAI's (frequency, presence: over generated tokens only, subtracted from the logits) and
    CTRL's repetition penalty (arXiv 1909.05858: over prompt and generated tokens, positive logits divided,
    negative ones multiplied).
    """

    n: int = 1
    """Completions per prompt; each is a sequence of its own, seeded with `seed + index`."""
    max_tokens: int | None = None
    """Most tokens to generate. None, in `LLM`: the checkpoint's max_new_tokens, then 16 for `generate` and what the
    model's length leaves for `chat`; in the engine what the length leaves."""
    min_tokens: int = 0
    """Neither EOS nor a stop token may be sampled, nor a stop string end the text, before this many tokens."""
    temperature: float = 1.0
    """0 is greedy: the most probable token after penalties, bias and bans."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of the given token ids, -100 to 100."""
    seed: int | None = None
    """Same seed, same tokens, but for rounding: what else is in the batch changes the last digits of logits, and with
    them one sampled token in some 27,000 (docs/batch.md). None: a fresh seed."""
    stop: Sequence[str] = ()
    """The text ends before the first of these strings, wherever token boundaries fall."""
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    """Strings that may not be generated (as token sequences, with and without a leading space)."""
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """The same as token ids, which is what the sampler takes: `ChatProcessor.resolve_params` makes them."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be generated, an end token only if it is one of them. None: all."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """The text ends behind the stop string, or the end token, that ended it, and not before."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. An end token is in it only with include_stop_str_in_output as well."""
    detokenize: bool = True
    """False: tokens are not made text, which is empty then. Stop strings need it."""
    truncate_prompt_tokens: int | None = None
    """Keep this many last tokens of a longer prompt; -1 keeps as many as leave room for max_tokens. A prompt with
    images is refused instead."""
    logprobs: int | None = None
    """None: no log probabilities. k: those of each sampled token and of the k most probable ones (0 to 20); -1: of the
    whole vocabulary. The setting `logprobs_mode` says which values they are."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """The rule for the answer: a JSON schema, a regular expression, a choice of texts or a grammar. It applies after
    the reasoning, if there is any."""
    max_thinking_tokens: int | None = None
    """In a chat, the end-of-thinking token is forced after this many tokens of reasoning; 0 forces it at once."""
    repetition_detection: RepetitionDetectionParams | Mapping[str, Any] | None = None
    """End an answer whose last tokens are one pattern over and over. Its finish_reason is `length`, its stop_reason
    `repetition_detected`. `max_pattern_size` 0 looks for nothing."""
    no_repeat_ngram_size: int = 0
    """The answer repeats no sequence of N tokens that it has already. The prompt does not count. 0: it may."""
    no_repeat_ngram_window: int | None = None
    """Only this many last tokens of the answer count. None means the limit."""
    no_repeat_ngram_exempt_ids: Sequence[int] = ()
    """Tokens that may come nevertheless."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt, but its first. Such a prompt is computed whole, whatever is cached."""
    return_hidden_states: bool = False
    """Return the hidden states of the layers that the setting `hidden_state_layers` names, of each token that was
    computed: the prompt and the answer but its last token. Nothing comes from the prefix cache."""

    if not TYPE_CHECKING:  # a checker reads the fields

        def __new__(cls, **fields: Any) -> SamplingParams:
            """Raises RequestError for a field of vLLM's, now or before, that is not served."""
            for name in fields.keys() & _NOT_SERVED.keys():
                raise field_error(name, f"SamplingParams has no such field; {_NOT_SERVED[name]}",
                                  "unsupported_parameter")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        self._set(**{name: check(name, getattr(self, name)) for name, check in _CHECKS.items()})
        if self.stop and not self.detokenize:
            raise _error("detokenize", "stop strings are looked for in the text; leave it on, or use stop_token_ids")
        if self.allowed_token_ids == ():
            raise _error("allowed_token_ids", "it is empty, so nothing could be generated; leave it out, or name some")
        self._check_answer_rules()
        self._check_guards()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise _error("truncate_prompt_tokens", "0 leaves nothing; -1 leaves as much as fits")
        if self.return_hidden_states and self.n > 1:
            raise _error("return_hidden_states", f"n {self.n} is more than one answer; repeat the prompt instead")
        if self.top_p == 0.0:
            raise _error("top_p", "must be greater than 0; use temperature 0 for greedy decoding")

    def _check_answer_rules(self) -> None:
        if self.structured_outputs is None:
            return
        self._set(structured_outputs=StructuredOutputsParams.from_value(self.structured_outputs))
        if self.ignore_eos:
            raise _error("ignore_eos", "with structured_outputs nothing comes behind the answer's end; leave it out")

    def _check_guards(self) -> None:
        if self.repetition_detection is not None:
            detection = RepetitionDetectionParams.from_value(self.repetition_detection)
            self._set(repetition_detection=detection if detection.is_on else None)
        size, window = self.no_repeat_ngram_size, self.no_repeat_ngram_window
        if size == 1:
            raise _error("no_repeat_ngram_size", "1 lets no token come twice; say 2 or more, 0 asks for nothing")
        if window is not None and window < size:
            raise _error("no_repeat_ngram_window", f"{window} is shorter than no_repeat_ngram_size {size}: nothing "
                                                   "would stand in it twice; raise it")
        for name in ("no_repeat_ngram_window", "no_repeat_ngram_exempt_ids"):
            if getattr(self, name) and not size:
                raise _error(name, f"{shown(getattr(self, name))} has no effect without no_repeat_ngram_size; say it")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_resolved(self) -> bool:
        """Bad words have token ids, and a rule for the answer is compiled."""
        rule = self.structured_outputs
        has_rule = isinstance(rule, StructuredOutputsParams) and bool(rule.compiled)
        return (rule is None or has_rule) and bool(self.bad_words_token_ids or not self.bad_words)

    def with_limit(self, most: int | None) -> SamplingParams:
        """Itself, or where it has no max_tokens and there is such a limit: with that, which min_tokens raises."""
        if self.max_tokens is not None or most is None:
            return self
        return self.replace(max_tokens=max(most, self.min_tokens))

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def num_top_logprobs(asked: int, vocab_size: int) -> int:
    """The number of most probable tokens that `logprobs` or `prompt_logprobs` ask for."""
    return vocab_size if asked == WHOLE_VOCABULARY else asked


def check_hidden_states(num_layers: int, hidden_size: int, num_tokens: int) -> None:
    """Refuse hidden states where no layer returns any, and more than one answer may hold."""
    name, limit = "return_hidden_states", LIMITS.max_hidden_states_bytes
    if not num_layers:
        raise field_error(name, "the model was loaded without hidden_state_layers; name the layers there, as "
                          "LLM(..., hidden_state_layers=(-1,))", "unsupported_parameter")
    num_bytes = 4 * num_layers * hidden_size * num_tokens
    if num_bytes > limit:
        raise field_error(name, f"{num_layers} layers x {num_tokens} tokens of prompt and answer x {hidden_size} "
                          f"numbers are {size(num_bytes)}, at most {size(limit)} are allowed; lower max_tokens, "
                          "shorten the prompt or name fewer hidden_state_layers", "too_many_hidden_states")


def _error(name: str, what: str) -> RequestError:
    return field_error(name, f"{what}", "invalid_sampling_parameter")


def _boolean(name: str, value: Any) -> bool:
    # One of numpy's is a truth value, too; numpy itself is not loaded for that.
    if not isinstance(value, bool) and type(value).__module__ + type(value).__name__.rstrip("_") != "numpybool":
        raise _error(name, f"{shown(value)} is neither true nor false")
    return bool(value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _error(name, f"{shown(value)} is not an integer")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _error(name, f"{shown(number)} is outside {low} to {'unlimited' if high is None else high}")
    return number


def _optional(name: str, value: Any, low: int, high: int | None = None) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _number(name: str, value: Any, low: float, high: float) -> float:
    # numpy's float32 and float16 count themselves among the real numbers, too.
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _is_finite(value):
        raise _error(name, f"{shown(value)} is not a finite number")
    number = float(value)
    if not low <= number <= high:
        raise _error(name, f"{shown(value)} is outside {low} to {high}")
    return number


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _strings(name: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(name, value, most, "strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise _error(name, f"{shown(item)} is not a non-empty string")
        if len(item) > most_chars:
            raise _error(name, f"{shown(item)} has {len(item)} characters, at most {most_chars} are allowed")
    return items


def _token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    return tuple(_integer(name, item, 0) for item in _items(name, value, most, "token ids"))


def _words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    # A word has two spellings, and no token is less than a byte.
    words = _items(name, value, 2 * LIMITS.max_bad_words, "lists of token ids")
    ids = tuple(_token_ids(name, word, 4 * LIMITS.max_bad_word_chars + 1) for word in words)
    if () in ids:
        raise _error(name, "a word has no tokens")
    return ids


def _biases(name: str, value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _error(name, f"{shown(value)} is not a mapping of token ids to numbers")
    check_count(name, "entries", value, LIMITS.max_logit_bias, "invalid_sampling_parameter")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has no other keys than strings.
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12
        token_id = _integer(name, int(key) if is_digits else key, 0)
        if token_id in biases:
            raise _error(name, f"token id {token_id} is given twice")
        biases[token_id] = _number(name, bias, -100.0, 100.0)
    return biases


def _items(name: str, value: Any, most: int, what: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _error(name, f"{shown(value)} is not a list of {what}")
    if isinstance(value, Sized):
        check_count(name, "entries", value, most, "invalid_sampling_parameter")
    items = tuple(value)
    check_count(name, "entries", items, most, "invalid_sampling_parameter")
    return items


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "stop": partial(_strings, most=LIMITS.max_stop_strings, most_chars=LIMITS.max_stop_chars),
    "bad_words": partial(_strings, most=LIMITS.max_bad_words, most_chars=LIMITS.max_bad_word_chars),
    "bad_words_token_ids": _words,
    "stop_token_ids": partial(_token_ids, most=LIMITS.max_stop_token_ids),
    "logit_bias": _biases,
    "n": partial(_integer, low=1, high=128),
    "max_tokens": partial(_optional, low=1),
    "min_tokens": partial(_integer, low=0),
    "top_k": lambda name, value: max(0, _optional(name, value, -1) or 0),
    "seed": partial(_optional, low=-(2**63), high=2**63 - 1),
    "ignore_eos": _boolean,
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
    "detokenize": _boolean,
    "logprobs": partial(_optional, low=WHOLE_VOCABULARY, high=MAX_TOP_LOGPROBS),
    "prompt_logprobs": partial(_optional, low=WHOLE_VOCABULARY, high=MAX_TOP_LOGPROBS),
    "return_hidden_states": _boolean,
    "temperature": partial(_number, low=0.0, high=100.0),
    "top_p": partial(_number, low=0.0, high=1.0),
    "min_p": partial(_number, low=0.0, high=1.0),
    "repetition_penalty": partial(_number, low=0.01, high=100.0),
    "frequency_penalty": partial(_number, low=-2.0, high=2.0),
    "presence_penalty": partial(_number, low=-2.0, high=2.0),
    "allowed_token_ids": lambda name, value: None if value is None else _token_ids(
        name, value, LIMITS.max_allowed_token_ids),
    "max_thinking_tokens": partial(_optional, low=0),
    "truncate_prompt_tokens": partial(_optional, low=-1),
    "no_repeat_ngram_size": partial(_integer, low=0, high=LIMITS.max_ngram_window),
    "no_repeat_ngram_window": partial(_optional, low=1, high=LIMITS.max_ngram_window),
    "no_repeat_ngram_exempt_ids": partial(_token_ids, most=LIMITS.max_ngram_exempt_ids),
}
"""The check of each field, which returns its value in Python's own types."""
