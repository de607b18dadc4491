"""Loads a checkpoint's tokenizer without transformers. Knows nothing of chats or images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from npu_runner.checkpoint.files import read_json
from npu_runner.errors import ModelError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """What the tokenizer's files call its special tokens: eos_token, pad_token, ..., those that they name."""
    values = read_json(folder, "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in values:  # older checkpoints keep the names in a file of their own
        values.update(read_json(folder, "special_tokens_map.json") or {})
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = values.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with the added tokens that only tokenizer_config.json lists.

    Raises ModelError when the file is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is missing; copy it from the original checkpoint, or write it once with "
            f"transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
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
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        missing = [(int(number), _added_token(entry)) for number, entry in listed.items()]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is malformed ({error!r})"
        ) from error
    for number, token in sorted(missing, key=lambda pair: pair[0]):
        if token.content in known:
            continue
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ModelError(
                f"{folder}: tokenizer_config.json gives {token.content!r} the id {number}, tokenizer.json leaves room "
                f"at {tokenizer.token_to_id(token.content)}; the files belong to different checkpoints"
            )


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
