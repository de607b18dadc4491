"""The parsers by their names, which a reader's file gives."""

from __future__ import annotations

import re
from collections.abc import Callable

from npu_runner.readers.answers.block import PAGE, AnswerError, Block, ParsedAnswer
from npu_runner.readers.answers.divs import parse_divs
from npu_runner.readers.answers.front_matter import parse_front_matter
from npu_runner.readers.answers.markdown_text import clean_markdown
from npu_runner.readers.answers.mineru import parse_block, parse_layout
from npu_runner.readers.answers.otsl import parse_otsl

# Nanonets marks the number of a page so.
_PAGE_NUMBER = re.compile(r"<page_number>([^<>]{0,40})</page_number>")


def parse_markdown(text: str, label: str) -> ParsedAnswer:
    """One block, the page, and one for each page number."""
    numbers = [Block(label="page_number", text=clean_markdown(found)) for found in _PAGE_NUMBER.findall(text)]
    page = Block(label=label or PAGE, text=clean_markdown(_PAGE_NUMBER.sub("", text)))
    return ParsedAnswer(blocks=(page, *numbers))


PARSERS: dict[str, Callable[[str, str], ParsedAnswer]] = {
    "markdown": parse_markdown,
    "front_matter": parse_front_matter,
    "divs": parse_divs,
    "mineru_layout": parse_layout,
    "mineru_block": parse_block,
    "otsl": parse_otsl,
}
"""By name, a function of the answer and of the label of the block that was asked for; it is empty for a whole page."""


def parse_answer(parser: str, text: str, *, label: str = "") -> ParsedAnswer:
    """The blocks of an answer. `label`: the kind of the block that the row asked for; empty for a whole page. Raises
    AnswerError where the answer does not have the form of this parser."""
    try:
        return PARSERS[parser](text, label)
    except RecursionError as error:
        raise AnswerError("has parts within parts, too deep to read") from error
