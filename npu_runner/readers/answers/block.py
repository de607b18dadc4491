"""A parsed answer and its blocks. Knows nothing of the formats in which readers answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Box = tuple[float, float, float, float]
PAGE = "page"
"""The label of a block that is a whole page, because its reader names no blocks."""
MARGINS = frozenset({"Page-Header", "Page-Footer", "header", "footer", "page_number"})
"""Labels of headers, footers and page numbers. They are blocks, but no part of the Markdown."""
_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")


class AnswerError(ValueError):
    """The answer does not have the form in which its reader answers. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a page, in reading order. `label`: the reader's own word for its kind."""

    label: str
    text: str
    """Markdown, with tables in HTML. It is clean: see `markdown_text`."""
    box: Box | None = None
    """x0, y0, x1, y1, from 0 to 1 of the page; None: the reader names none, or one that is no box."""
    rotation: int = 0
    """The block is upright after a clockwise rotation by this number of degrees."""
    is_continued: bool = False
    """It continues the paragraph of the block before it."""


@dataclass(frozen=True, kw_only=True)
class ParsedAnswer:
    """The blocks of a page, or of a part of it."""

    blocks: tuple[Block, ...]
    rotation: int = 0
    """The reader says that the page is upright after a clockwise rotation by this number of degrees."""

    @property
    def markdown(self) -> str:
        return markdown_of(self.blocks)


def markdown_of(blocks: Iterable[Block]) -> str:
    """The text of the page: a paragraph for each block, without headers, footers and page numbers."""
    parts: list[str] = []
    latest: dict[str, int] = {}  # of each label: a table may stand between the two parts of a paragraph
    for block in blocks:
        if not block.text or block.label in MARGINS:
            continue
        place = latest.get(block.label)
        if block.is_continued and place is not None:
            # Chinese and Japanese have no spaces between words.
            is_spaced = not (_CJK.match(parts[place][-1]) or _CJK.match(block.text))
            parts[place] += (" " if is_spaced else "") + block.text
        else:
            latest[block.label] = len(parts)
            parts.append(block.text)
    return "\n\n".join(parts)


def box_of(numbers: Iterable[float | str]) -> Box | None:
    """The box of four numbers from 0 to 1000; None: they are none. Reversed ends are swapped, and ends outside of the
    page are moved to its edge."""
    try:
        x0, y0, x1, y1 = (min(max(float(number) / 1000, 0.0), 1.0) for number in numbers)
    except ValueError:
        return None
    box = min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)
    return box if box[0] < box[2] and box[1] < box[3] else None
