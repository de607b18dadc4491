"""Turns one sequence's tokens into text as they come, up to a stop string; single tokens into their bytes and the text
shown for them. Knows nothing of models.

Only text that no later token can change is given out. The text of a token depends on its neighbours: a character may
span tokens, the first word may lose its space. So a short window is decoded anew, never a single token.

Stop strings are found by an Aho-Corasick automaton: the work for a character does not depend on their number or length.
Its nodes are made when a text first gets there: of 64 strings with 1,024 characters each nearly all are never begun.

Two ways to spell bytes as tokens are in use. Byte-level BPE maps each byte to a printable character. SentencePiece has
tokens <0x00> to <0xFF> for what its vocabulary lacks.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from npu_runner.request.sampling_params import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONG_WINDOW = 32  # tokens without a clean end; then a place to cut is looked for, so that decoding stays linear
_CACHED_AUTOMATA = 64
_CACHED_TOKENS = 1 << 15  # of a few hundred bytes each
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens


class IncrementalDetokenizer:
    """Text of one growing sequence: in the end `tokenizer.decode` of its tokens, or what precedes a stop string.

    Of several stop strings the one completed first counts, of those the longest: how the text was cut into tokens
    makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special_tokens: bool = True,
                 include_stop: bool = False):
        """include_stop: the text holds the stop string or the end token that ends it."""
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._includes_stop = include_stop
        self._hidden_ids = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._num_read = 0
        self._run = _ByteRun(byte_of_token(tokenizer))
        self._confirmed = _ConfirmedText(tokenizer, unfinished="" if byte_of_token(tokenizer) else _REPLACEMENT)
        self._search = StopSearch(stop) if stop else None
        self._final: str | None = None

    def append(self, token_ids: list[int], *, stops_allowed: bool = True) -> str | None:
        """Add tokens; returns the stop string that they complete, which ends the text, or None.

        A stop string completed while stops are not allowed is text like any other.
        """
        assert self._final is None, "the text has ended"
        self._ids += token_ids
        if self._search is None:
            return None  # the text is decoded when it is read
        while self._num_read < len(self._ids):
            found = self._search.feed(self._read_next(), is_allowed=stops_allowed)
            if found is not None:
                position, stop = found
                end = position + len(stop) if self._includes_stop else position
                self._final = (self._confirmed.text + self._run.text)[:end]
                return stop
        return None

    def append_end_token(self, token_id: int) -> None:
        """Add the token that ends the sequence: part of the text only if stops are, and never searched."""
        if self._includes_stop:
            self._ids.append(token_id)

    @property
    def text(self) -> str:
        """The final text so far: without a partial character, and without a possible start of a stop string."""
        if self._final is not None:
            return self._final
        while self._num_read < len(self._ids):
            self._read_next()
        confirmed = self._confirmed.text
        num_started = self._search.num_started(at_mark=self._run.is_open) if self._search else 0
        return confirmed[: len(confirmed) - num_started]

    def finish(self) -> str:
        """End the text, bytes that never became a character as U+FFFD, and return all of it."""
        if self._final is None:
            self._final = self._tokenizer.decode(self._ids, skip_special_tokens=self._skips_special_tokens)
        return self._final

    def _read_next(self) -> str:
        """Read one more token; returns the text it adds, confirmed or so far valid."""
        token_id = self._ids[self._num_read]
        self._num_read += 1
        if token_id in self._hidden_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        if self._run.accepts(token_id):
            return self._read_byte(token_id)
        expected = self._run.close()
        fresh = self._confirmed.append(token_id)
        if expected is not None and fresh.startswith(expected):
            return fresh[len(expected):]
        self._retract_run()
        return fresh

    def _read_byte(self, token_id: int) -> str:
        if self._search is not None and not self._run.is_open:
            self._search.mark()
        self._confirmed.hold(token_id)
        at_start = not self._confirmed.length and not self._run.has_text
        fresh = self._run.feed(token_id)
        if fresh is None:
            self._retract_run()
        elif fresh and at_start:  # where a decoder drops spaces
            fresh = self._confirmed.decode_held()
            self._run.replace(fresh)
        return fresh or ""

    def _retract_run(self) -> None:
        if self._search is not None:
            self._search.retract()


def detokenizer_for(params: SamplingParams, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    """The one that makes the text that a request asks for."""
    return IncrementalDetokenizer(
        tokenizer, stop=params.stop, skip_special_tokens=params.skip_special_tokens,
        include_stop=params.include_stop_str_in_output)


class _ConfirmedText:
    """Text of tokens that ends with a complete character."""

    def __init__(self, tokenizer: Tokenizer, *, unfinished: str):
        """unfinished: what a begun character decodes to; "" where only byte tokens, which are held, begin one."""
        self._tokenizer = tokenizer
        self._unfinished = unfinished
        self._pieces: list[str] = []
        self.length = 0
        self._window: list[int] = []
        self._num_context = 0
        """Leading tokens of the window that make complete characters: the context of those behind."""
        self._num_given = 0
        """Leading characters of the window's text that `_pieces` holds."""

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def hold(self, token_id: int) -> None:
        """Add a token whose text depends on the next ones."""
        self._window.append(token_id)

    def decode_held(self) -> str:
        """The current text of the tokens after the final text."""
        return self._decode(self._window)[self._num_given:]

    def append(self, token_id: int) -> str:
        """Add a token; returns the characters that are now certain."""
        self._window.append(token_id)
        window_text = self._decode(self._window)
        # Of the replacement characters at the end only the last can still become another one.
        certain = window_text.removesuffix(self._unfinished)
        fresh, self._num_given = certain[self._num_given:], max(self._num_given, len(certain))
        self._pieces.append(fresh)
        self.length += len(fresh)
        if certain == window_text:
            self._move_window()
        elif len(self._window) > _LONG_WINDOW:
            self._cut_window(window_text)
        return fresh

    def _move_window(self) -> None:
        context = self._window[self._num_context:]
        context_text = self._decode(context)
        if context_text:  # without text before it a word would lose its space
            self._window, self._num_given = context, len(context_text)
        self._num_context = len(self._window)

    def _cut_window(self, window_text: str) -> None:
        """Drop tokens from the front where text before and after the cut join to the same."""
        for at in range(len(self._window) - 1, len(self._window) - 1 - _LONGEST_CHARACTER, -1):
            kept_text = self._decode(self._window[at:])
            if kept_text and self._decode(self._window[:at]) + kept_text == window_text:
                self._window, self._num_context = self._window[at:], 0
                self._num_given = len(kept_text.removesuffix(self._unfinished))
                return

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class _ByteRun:
    """Byte tokens (<0xE4>) since the last other one. They are text only if all together are valid UTF-8, otherwise a
    U+FFFD each, so that none of them is confirmed before the run ends."""

    def __init__(self, byte_of_token: Mapping[int, int]):
        self._byte_of_token = byte_of_token
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._pieces: list[str] = []
        self._is_valid = True
        self.is_open = False
        """The last token is one of these bytes."""

    @property
    def text(self) -> str:
        """The complete characters, as long as the run is valid."""
        return "".join(self._pieces)

    @property
    def has_text(self) -> bool:
        return any(self._pieces)

    def replace(self, text: str) -> None:
        """Take what the decoder makes of the characters so far for them."""
        self._pieces = [text]

    def accepts(self, token_id: int) -> bool:
        return token_id in self._byte_of_token

    def feed(self, token_id: int) -> str | None:
        """The character that this byte completes, "" if none; None if the run is no text after all."""
        self.is_open = True
        if not self._is_valid:
            return ""
        try:
            fresh = self._decoder.decode(bytes([self._byte_of_token[token_id]]))
        except UnicodeDecodeError:
            self._is_valid = False
            self._pieces.clear()
            return None
        self._pieces.append(fresh)
        return fresh

    def close(self) -> str | None:
        """End the run; its text, None if it is not valid as a whole."""
        text = self.text if self._is_valid and not self._decoder.getstate()[0] else None
        self._decoder.reset()
        self._pieces.clear()
        self._is_valid = True
        self.is_open = False
        return text


class StopSearch:
    """The search for stop strings in one growing text."""

    def __init__(self, stops: Sequence[str]):
        self._root = _root(tuple(stops))
        self._node = self._root
        self._length = 0
        self._mark = (self._root, 0)

    def feed(self, fresh: str, *, is_allowed: bool) -> tuple[int, str] | None:
        """(position in the text, stop string) of the one that `fresh` completes first, of several the longest."""
        node, at = self._node, self._length
        for char in fresh:
            node = node.next.get(char) or _step(node, char, self._root)
            at += 1
            if is_allowed and node.completed:
                return at - len(node.completed), node.completed
        self._node, self._length = node, at
        return None

    def mark(self) -> None:
        """Remember this place: what follows may be taken back."""
        self._mark = (self._node, self._length)

    def retract(self) -> None:
        """Forget what came after the mark."""
        self._node, self._length = self._mark

    def num_started(self, *, at_mark: bool) -> int:
        """Characters at the end of the text that begin a stop string; `at_mark`: of the text up to the mark."""
        node = self._mark[0] if at_mark else self._node
        while node.fallback is not None and not node.continuations:
            node = node.fallback  # a whole stop string that was not allowed begins nothing
        return node.depth


class _Node:
    """A beginning of stop strings: the longest that the text ends with."""

    __slots__ = ("completed", "continuations", "depth", "fallback", "next")

    def __init__(self, depth: int, stops: Sequence[str]):
        """stops: all that begin with these `depth` characters."""
        self.depth = depth
        self.next: dict[str, _Node] = {}
        """By the character that follows, as far as texts have got."""
        self.continuations: dict[str, list[str]] = {}
        """By the character that follows: the stop strings that go on with it."""
        self.fallback: _Node | None = None
        """The longest beginning that ends this one and is shorter; None at the root."""
        self.completed = ""
        """The longest stop string that this ends with."""
        for stop in stops:
            if len(stop) > depth:
                self.continuations.setdefault(stop[depth], []).append(stop)
            else:
                self.completed = stop


@functools.lru_cache(maxsize=_CACHED_AUTOMATA)
def _root(stops: tuple[str, ...]) -> _Node:
    return _Node(0, stops)


def _step(node: _Node, char: str, root: _Node) -> _Node:
    """The node behind `node` and `char`, made with all that it falls back to if no text has been there."""
    made: list[tuple[_Node, _Node]] = []
    target, parent = root, node
    while True:
        known = parent.next.get(char)
        if known is not None:
            target = known
            break
        if char in parent.continuations:
            made.append((parent, _Node(parent.depth + 1, parent.continuations[char])))
        if parent.fallback is None:
            break
        parent = parent.fallback
    for parent, child in reversed(made):
        child.fallback = target
        child.completed = child.completed or target.completed
        parent.next[char] = child
        target = child
    return target


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
