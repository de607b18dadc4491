"""Keeps control tokens that a person typed from becoming control tokens. Knows tokenizers, not template syntax.

Typed ones are enclosed by two characters that occur nowhere in the conversation. The template renders around these, and
what stands between them is encoded as ordinary characters. Text without them takes the plain path unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from tokenizers import AddedToken, Tokenizer

from npu_runner.errors import RequestError
from npu_runner.request.limits import field_error

_FENCE_CANDIDATES = range(0xE000, 0xF8FF)  # private use: never part of a word, a space or another character


class ControlTokens:
    """The added tokens of one checkpoint that steer the model, and how to encode around typed ones."""

    def __init__(self, tokenizer: Tokenizer, template_literals: Sequence[str] = (), always: Iterable[str] = (), *,
                 of_assistants: Iterable[str] = ()):
        """`always`: tokens that count whatever their flags (the image's); `of_assistants`: those that do in all
        messages but the assistant's own (the tags of reasoning)."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self.tokens = _select(added, template_literals, {*always, *of_assistants})
        self._pattern = _pattern(self.tokens)
        special = _select(added, (), set(always))
        # What the model itself wrote may hold its tags (`<think>`) as tokens; ending a turn is for the template alone.
        self._patterns = {"assistant": _pattern(special)}
        self._ids = {tokenizer.token_to_id(token) for token in self.tokens}
        self._beginnings = tuple({token[:length] for token in self.tokens for length in range(1, len(token))})
        self._newline_ids = tokenizer.encode("\n", add_special_tokens=False).ids
        self._prefix_ids, self._suffix_ids = _surroundings(tokenizer)
        self._ahead: dict[str, list[int]] = {}

    @property
    def surroundings(self) -> tuple[list[int], list[int]]:
        """The tokens that the checkpoint's post-processor puts before and after a text."""
        return self._prefix_ids, self._suffix_ids

    def typed_in(self, texts: Iterable[tuple[str, str]]) -> bool:
        """Whether any of the (role, text) holds a control token that only the template may write."""
        return any(self._patterns.get(role, self._pattern).search(text) for role, text in texts)

    def fence(self, role: str, text: str, is_part: bool, *, fences: tuple[str, str]) -> str:
        """The text with its control tokens fenced in; a part that ends within one is kept apart from the next part."""
        opening, closing = fences
        pattern = self._patterns.get(role, self._pattern)
        fenced = pattern.sub(lambda match: f"{opening}{match[0]}{closing}", text)
        # Templates write parts side by side: "<|im_" and "end|>" would join into a token. A lone fence stops that.
        return fenced + closing if is_part and text.endswith(self._beginnings) else fenced

    def encode(self, text: str, *, add_special_tokens: bool, fences: tuple[str, str] | None = None) -> list[int]:
        """Token ids of `text`; control tokens in it are control tokens unless they are fenced.

        `add_special_tokens`: with what the checkpoint's post-processor puts around a text (a BOS token).
        Raises RequestError when a control token comes out that was not written as one.
        """
        pieces = [text] if fences is None else self._split_at(fences, text)
        ids: list[int] = []
        for number, piece in enumerate(pieces):  # trusted, typed, trusted, typed, ...; typed is None at a lone fence
            if piece:
                encode = self._encode_words if number % 2 == 1 else self._encode_trusted
                ids += encode(piece) if number == 0 else self._after_other_text(piece, encode)
        if not self._ids.isdisjoint(ids) and sum(token in self._ids for token in ids) > sum(
                len(self._pattern.findall(piece)) for piece in pieces[::2] if piece):
            raise RequestError(
                "the tokenizer makes a control token of ordinary characters in this prompt; remove what looks like one",
                code="special_token_in_text")
        return self._prefix_ids + ids + self._suffix_ids if add_special_tokens else ids

    def encode_plainly(self, text: str) -> list[int]:
        """Token ids of a text by itself, in which nothing is a control token."""
        has_control = self._pattern.search(text) is not None
        return self._encode_words(text) if has_control else self._encode_trusted(text)

    def _split_at(self, fences: tuple[str, str], text: str) -> list[str]:
        opening, closing = fences
        return re.split(f"{opening}({self._pattern.pattern}){closing}|[{opening}{closing}]", text)

    def encode_ahead(self, texts: Sequence[str]) -> None:
        """Encode texts together that will be encoded next, on all cores of this host. Forgets those of the last call.
        Where the tokenizer refuses one of them, each is encoded by itself, when its turn comes."""
        try:
            self._ahead = dict(zip(texts, self._encode_all(texts), strict=True))
        except Exception:  # noqa: BLE001 - the library raises plain Exception, and does not say for which text
            self._ahead = {}

    def _encode_trusted(self, text: str) -> list[int]:
        ids = self._ahead.get(text)
        return self._encode_all([text])[0] if ids is None else ids

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        # Encodings of encode_batch_fast have no places of tokens in the text, which are a third of the work.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_words(self, text: str) -> list[int]:
        # The tokenizer's stages by hand: its `encode_special_tokens` skips special added tokens but not the others.
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        words = [text]
        if self._tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._tokenizer.model.tokenize(word)]

    def _after_other_text(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        # Some tokenizers put a space before the first word. A newline in front, removed again, shows them that
        # this is not the first; where it melts into the text the tokenizer is not of that kind.
        ids = encode("\n" + text)
        num_newline = len(self._newline_ids)
        return ids[num_newline:] if ids[:num_newline] == self._newline_ids else encode(text)


def unused_fences(texts: Sequence[str]) -> tuple[str, str]:
    """Two private-use characters that occur in none of the texts."""
    used = set().union(*texts)
    free = [chr(code) for code in _FENCE_CANDIDATES if chr(code) not in used]
    if len(free) < 2:
        raise field_error("messages", "the text holds every private-use character", "invalid_unicode")
    return free[0], free[1]


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _select(added: Iterable[AddedToken], template_literals: Sequence[str], always: set[str]) -> frozenset[str]:
    written = "\0".join(template_literals)  # joined by what no token holds, so that none spans two literals
    return frozenset(
        token.content
        for token in added
        if token.special
        or token.content in always
        or (token.content in written and not token.content.isspace())  # whitespace tokens are ordinary text
    )


def _surroundings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    probe = "a"
    bare = tokenizer.encode(probe, add_special_tokens=False).ids
    whole = tokenizer.encode(probe, add_special_tokens=True).ids
    start = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]
