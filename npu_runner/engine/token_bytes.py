"""What single tokens stand for: their bytes and the text shown for them. Knows tokenizers, not sequences.

Two ways to spell bytes as tokens are in use: byte-level BPE maps each byte to a printable character, SentencePiece
has tokens <0x00> to <0xFF> for what its vocabulary lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tokenizers import Tokenizer

_CACHED_TOKENS = 1 << 15  # of a few hundred bytes each


@functools.lru_cache(maxsize=8)
def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that decoding leaves out when it skips special tokens."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


@functools.lru_cache(maxsize=8)
def byte_of_token(tokenizer: Tokenizer) -> Mapping[int, int]:
    """Byte by token id, for tokenizers that fall back to byte tokens; empty for the others."""
    if not _falls_back_to_bytes(tokenizer):
        return {}
    ids = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


@functools.lru_cache(maxsize=_CACHED_TOKENS)
def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """(text, bytes) of one token inside a text: with its leading space, and part of a character shown as U+FFFD.

    An id without a token, as in padded vocabularies, is empty.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return "", b""
    if token_id in byte_of_token(tokenizer):
        raw = bytes([byte_of_token(tokenizer)[token_id]])
    elif _is_byte_level(tokenizer) and all(char in _byte_of_character() for char in token):
        raw = bytes(_byte_of_character()[char] for char in token)
    else:
        raw = _text_after_a_word(tokenizer, token).encode()
    return raw.decode(errors="replace"), raw


def _text_after_a_word(tokenizer: Tokenizer, token: str) -> str:
    if tokenizer.decoder is None:
        return token
    return tokenizer.decoder.decode(["a", token]).removeprefix("a")


@functools.lru_cache(maxsize=8)
def _falls_back_to_bytes(tokenizer: Tokenizer) -> bool:
    return tokenizer.decoder is not None and tokenizer.decoder.decode(["<0xC3>", "<0xA9>"]) == "é"


@functools.lru_cache(maxsize=8)
def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return tokenizer.decoder is not None and tokenizer.decoder.decode(["Ã", "©"]) == "é"


@functools.lru_cache(maxsize=1)
def _byte_of_character() -> Mapping[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
