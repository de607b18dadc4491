"""The longest text that a rule forces in one piece. Knows text, neither schemas nor grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

_MOST_WRITTEN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """`text` is None if it is too long to write out: then only its length is known."""

    num_bytes: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Text:
    """A part of an answer: the bytes of its shortest text, and the longest run of bytes that all its texts contain."""

    num_bytes: int
    run: Run
    is_free: bool
    """It has several texts; else `run` is all of it."""


_NOTHING = Run(0, "")
FREE = Text(0, _NOTHING, True)
"""Any text, also the empty one."""


def text_of(text: str) -> Text:
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    return Text(num_bytes, Run(num_bytes, text if num_bytes <= _MOST_WRITTEN_BYTES else None), False)


def joined(parts: Iterable[Text | None]) -> Text | None:
    """One behind the other; None (no text at all will do) where one of them is."""
    runs: list[Run] = []
    pieces: list[Run] = []
    num_bytes, is_free = 0, False
    for part in parts:
        if part is None:
            return None
        num_bytes += part.num_bytes
        if part.is_free:
            runs += [_joined_runs(pieces), part.run]
            pieces, is_free = [], True
        else:
            pieces.append(part.run)
    return Text(num_bytes, max([*runs, _joined_runs(pieces)], key=lambda run: run.num_bytes), is_free)


def times(text: Text | None, count: int) -> Text | None:
    """`count` of it in a row, or more."""
    if count == 0:
        return FREE
    if text is None:
        return None
    if text.is_free:
        return replace(text, num_bytes=count * text.num_bytes)
    run = text.run
    num_bytes = run.num_bytes * count
    is_written = run.text is not None and num_bytes <= _MOST_WRITTEN_BYTES
    return Text(num_bytes, Run(num_bytes, str(run.text) * count if is_written else None), False)


def any_of(texts: Iterable[Text | None]) -> Text | None:
    """The text of alternatives; None if none of them can be satisfied."""
    found = [text for text in texts if text is not None]
    if len(found) < 2:
        return found[0] if found else None
    return Text(min(text.num_bytes for text in found),
                min((text.run for text in found), key=lambda run: run.num_bytes), True)


def all_of(texts: Sequence[Text | None]) -> Text | None:
    """The text of a conjunction; None if one part cannot be satisfied."""
    found = [text for text in texts if text is not None]
    if not found or len(found) < len(texts):
        return None
    return Text(max(text.num_bytes for text in found),
                max((text.run for text in found), key=lambda run: run.num_bytes),
                all(text.is_free for text in found))


def num_tokens(text: Text, encode: Callable[[str], Sequence[int]], longest_token_bytes: int) -> int:
    """The number of tokens of the run; a lower bound if the run is too long to be written out."""
    run = text.run
    return len(encode(run.text)) if run.text is not None else -(-run.num_bytes // longest_token_bytes)


def _joined_runs(runs: Sequence[Run]) -> Run:
    num_bytes = sum(run.num_bytes for run in runs)
    texts = [run.text for run in runs if run.text is not None]
    is_written = len(texts) == len(runs) and num_bytes <= _MOST_WRITTEN_BYTES
    return Run(num_bytes, "".join(texts) if is_written else None)
