"""Loads a checkpoint's tokenizer without transformers, checks that text fits into the context, and encodes bad words.

This happens where prompts are prepared, so that no step waits for a tokenizer. Knows no chats, images or logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from npu_runner.checkpoint.files import read_json
from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.request.limits import field_error, shown, wrong_type
from npu_runner.request.sampling_params import SamplingParams

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTES = (bytes, bytearray, memoryview)
"""Sequences of numbers that are no token ids."""
_PIECE_CHARS = 1 << 16
# A text with more characters per token of the context is checked more closely: few languages have more.
_USUAL_CHARS = 4
# Each cut of a text into pieces adds a few tokens; this share above the limit cannot come from the cuts.
_CLEARLY_MORE = 1.25


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens that the tokenizer's files name: eos_token, pad_token, ..."""
    values = read_json(folder, "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in values:  # older checkpoints keep the names in a file of their own
        values.update(read_json(folder, "special_tokens_map.json") or {})
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name in _SPECIAL_TOKENS if isinstance(text := texts.get(name), str)}


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with the added tokens of tokenizer_config.json. Their flags count where the two
    files differ, as in transformers.

    Raises ModelError when the file is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is missing; copy it from the original checkpoint, or write it once with "
            f"transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{path}: not a tokenizer ({error}); copy it again from the original checkpoint") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_listed_tokens(tokenizer, folder)
    return tokenizer


def _add_listed_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    listed = (read_json(folder, "tokenizer_config.json") or {}).get("added_tokens_decoder") or {}
    known = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        tokens = [(int(number), _added_token(entry)) for number, entry in listed.items()]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is malformed ({error!r})") from error
    named = set(read_special_tokens(folder).values())
    for number, token in sorted(tokens, key=lambda pair: pair[0]):
        token.special = token.special or token.content in named
        if repr(token) == known.get(token.content):
            continue
        tokenizer.add_tokens([token])
        if token.content not in known and tokenizer.token_to_id(token.content) != number:
            raise ModelError(
                f"{folder}: tokenizer_config.json gives {token.content!r} the id {number}, tokenizer.json leaves room "
                f"at {tokenizer.token_to_id(token.content)}; the files belong to different checkpoints")


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return AddedToken(entry["content"], special=bool(entry.get("special")), **flags)


def resolve_sampling(params: SamplingParams, encode: Callable[[str], list[int]],
                     vocab_size: int | None) -> SamplingParams:
    """`params` with its bad words as token ids, with and without a space before them, beside those given as ids. A
    second call changes nothing.

    encode: text to token ids without special tokens. Raises RequestError for ids that a model of `vocab_size` lacks.
    """
    check_sampling_ids(params, vocab_size)
    if not params.bad_words:
        return params
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for spelling in (word, f" {word}"):
            ids = tuple(encode(spelling))
            _check_ids(f"bad_words: {shown(word)}", ids, vocab_size)
            if ids:
                found[ids] = None
    if not found:
        raise field_error("bad_words", "this model's tokenizer makes no token of any of them; leave them out",
                          "invalid_sampling_parameter")
    found |= dict.fromkeys(map(tuple, params.bad_words_token_ids))
    resolved = tuple(sorted(found))
    return params if resolved == params.bad_words_token_ids else params.replace(bad_words_token_ids=resolved)


def check_sampling_ids(params: SamplingParams, vocab_size: int | None) -> None:
    """Raises RequestError, naming the field, for an id that the model lacks."""
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("no_repeat_ngram_exempt_ids", params.no_repeat_ngram_exempt_ids, vocab_size)
    _check_ids("bad_words_token_ids", [i for ids in params.bad_words_token_ids for i in ids], vocab_size)


def _check_ids(what: str, ids: Collection[int], vocab_size: int | None) -> None:
    if ids and vocab_size is not None and (highest := max(ids)) >= vocab_size:
        name = what.split(":")[0]
        raise RequestError(
            f"{what}: token id {highest} is asked for, the model has 0 to {vocab_size - 1}",
            code="invalid_sampling_parameter", param=name)


def plain_ids(prompt: Any) -> Any:
    """Token ids of an array, or array numbers, as a list of Python integers. Anything else is returned unchanged; later
    checks name it."""
    if isinstance(prompt, (str, *BYTES, Mapping)):
        return prompt
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence) or are_plain_ids(ids):
        return ids
    return [plain_number(token) for token in ids]


def are_plain_ids(ids: Sequence[Any]) -> bool:
    """Whether all are Python's own integers. Written without a loop of Python's: prompts have thousands of tokens."""
    return set(map(type, ids)) <= {int}


def checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    """The token ids of a prompt, which may be an array. Raises RequestError for anything else."""
    if isinstance(prompt, list) and prompt and are_plain_ids(prompt) and min(prompt) >= 0 and max(prompt) < vocab_size:
        return prompt[:]
    ids = plain_ids(prompt)
    if isinstance(ids, (str, *BYTES)) or not isinstance(ids, Sequence):
        raise wrong_type("prompt", "text or a list of token ids", prompt)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise field_error("prompt", f"{token!r} is not a token id of this model (0 to {vocab_size - 1})",
                              "invalid_type")
    return list(ids)


def plain_number(value: Any) -> Any:
    """An integer of numpy's or torch's as Python's own; any other value as it is."""
    number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    return number if type(number) is int else value


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises RequestError for a prompt that leaves no room for an answer."""
    if num_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, the model takes {max_model_len} with at least one generated; "
            "shorten it, send smaller images or raise max_model_len", code="prompt_too_long")


def transformers_tokenizer(folder: str, chat_template: str | None) -> Any:
    """The tokenizer of a checkpoint's folder as transformers makes it, with this chat template if there is one.

    Raises ConfigError where transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("get_tokenizer: it is transformers' tokenizer, and transformers is not installed; in a clone "
                          "pip install -e '.[transformers]' does that. llm.processor.tokenizer is that of the package "
                          "tokenizers") from error
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


class TextLength:
    """Whether prompts are shorter than `max_model_len` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len

    def check(self, texts: Sequence[str], *, is_cut: bool = False) -> None:
        """Raises RequestError for texts with certainly more tokens than the context.

        A text has at least its characters divided by those of the longest token. A text below that bound, but longer
        than usual, is tokenized in pieces until they are clearly too many. `is_cut`: the prompt is truncated, so only a
        text too long to tokenize is refused.
        """
        num_chars = sum(map(len, texts))
        if num_chars <= self.max_model_len * _USUAL_CHARS:
            return
        limit = self.max_model_len * self.longest_token
        if num_chars > limit:
            raise RequestError(
                f"the text has {num_chars} characters; at most {limit} can fit into {self.max_model_len} tokens "
                f"(max_model_len) of {self.longest_token} characters; shorten it",
                code="prompt_too_long")
        if not is_cut:
            self._check_pieces(texts)

    def check_tokens(self, num_tokens: int) -> None:
        """Raises RequestError for a prompt that leaves no room for an answer."""
        check_prompt_length(num_tokens, self.max_model_len)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; where tokens are bytes, one character of theirs is a byte."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def _check_pieces(self, texts: Sequence[str]) -> None:
        num_tokens, most = 0, int(self.max_model_len * _CLEARLY_MORE)
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARS):
                piece = text[start : start + _PIECE_CHARS]
                num_tokens += len(self._tokenizer.encode(piece, add_special_tokens=False).ids)
                if num_tokens > most:
                    raise RequestError(
                        f"the text has more than {self.max_model_len} tokens (max_model_len); shorten it",
                        code="prompt_too_long")
