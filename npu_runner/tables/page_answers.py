"""The answers about pages of documents: the blocks and the flaws of each. Knows nothing of files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.joined import Joined
from npu_runner.batch.rows.openai_response import FAULTS, PAGE
from npu_runner.readers.answers.block import PAGE as PAGE_LABEL
from npu_runner.readers.answers.block import AnswerError, Block, Box, ParsedAnswer
from npu_runner.readers.answers.markdown_text import clean_markdown
from npu_runner.readers.answers.parsers import parse_answer
from npu_runner.request.outputs import REPETITION_DETECTED
from npu_runner.tables.first_pass import Answer, cells_of, metadata_of

_PAGE_OF_ID = re.compile(r"(.+?)#page=([1-9][0-9]{0,8})(?:&block=[0-9]+)?", re.DOTALL)
NO_ANSWER, CUT_OFF, REPEATED, BLANK, EMPTY, REFUSED = "no answer", "cut off", "repeated", "blank", "empty", "refused"
LAYOUT, UNCOUNTED = "layout", "of a document that did not open"


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """The part of a document that a row shows: a page, or a block of one."""

    document: str
    page: int = 1
    block: int | None = None
    """The number of the block on its page; None: the row shows the page."""
    label: str = ""
    box: Box | None = None
    is_continued: bool = False
    is_uncounted: bool = False
    """The document did not open when its rows were made, so that it may have more pages than rows."""
    layout: str = ""
    """The flaws of the answer that has found the blocks, in words."""

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> PageRow:
        """By the row's metadata, else by its custom_id."""
        named, custom_id = metadata_of(request), str(request.get("custom_id", ""))
        found = _PAGE_OF_ID.fullmatch(custom_id)
        document, page = named.get("document"), named.get("page")
        if not isinstance(document, str):
            document, page = (found[1], int(found[2])) if found else (custom_id, 1)
        block, label, layout = named.get("block"), named.get("label"), named.get("layout")
        return cls(document=document, page=page if type(page) is int else 1,
                   block=block if type(block) is int else None, label=label if isinstance(label, str) else "",
                   box=_box(named.get("box")), is_continued=named.get("continued") is True,
                   is_uncounted=named.get("pages", 0) is None,
                   layout=layout if isinstance(layout, str) else "")


def images_of(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The addresses of a chat's images, with their fields."""
    body = request.get("body")
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("image_url"), dict):
                yield part["image_url"]


def _box(value: Any) -> Box | None:
    """The box in metadata, whose values are texts."""
    try:
        x0, y0, x1, y1 = map(float, str(value).split())
    except ValueError:
        return None
    return x0, y0, x1, y1


@dataclass(frozen=True, kw_only=True)
class PageAnswer:
    """The answer to a row. `flaws`: the words for users, by kind."""

    blocks: tuple[Block, ...] = ()
    flaws: Mapping[str, str]
    rotation: int = 0


def page_answers(requests: Iterable[Mapping[str, Any]], joined: Joined,
                 answers: AnswerFile) -> Iterator[tuple[PageRow, Answer | None]]:
    """Each row of the input with its answer, in the order of the input. None: there is none yet."""
    for request, place in zip(requests, joined.answers_R, strict=True):
        yield PageRow.from_request(request), None if place < 0 else answers.row(int(place))


def read_page(row: PageRow, answer: Answer | None, parser: str) -> PageAnswer:
    """`answer` None: there is none yet."""
    if answer is None:
        return PageAnswer(flaws={NO_ANSWER: "has no answer yet"})
    try:
        cells = cells_of(answer)[0]
    except (*FAULTS, IndexError):
        return PageAnswer(flaws={NO_ANSWER: "has no answer that can be read"})
    flaws = {BLANK: "is blank"} if row.block is None and _is_blank(answer) else {}
    if "error_code" in cells:
        return PageAnswer(flaws={**flaws, NO_ANSWER: f"has no answer: {cells['error_code'] or 'unknown'}"})
    if cells.get("finish_reason") == "length":
        if cells.get("stop_reason") == REPETITION_DETECTED:
            flaws[REPEATED] = "is cut off because its answer repeats itself"
        else:
            flaws[CUT_OFF] = "is cut off at the limit of tokens"
    text = cells.get("text")
    text = text.strip("\n") if isinstance(text, str) else ""
    rotation = 0
    try:
        parsed = parse_answer(parser, text, label=row.label) if text else ParsedAnswer(blocks=())
        found, rotation = parsed.blocks, parsed.rotation
    except AnswerError as error:
        flaws[REFUSED] = f"has its answer as it came, which is not in its reader's form: it {error}"
        found = _as_it_came(row, text)
    blocks = found if row.block is None else tuple(_placed(row, block) for block in found)
    if not flaws and row.block is None and not any(block.text or block.box for block in blocks):
        flaws[EMPTY] = "has an empty answer"
    return PageAnswer(blocks=blocks, flaws=flaws, rotation=rotation)


def _as_it_came(row: PageRow, text: str) -> tuple[Block, ...]:
    with contextlib.suppress(AnswerError):
        return (Block(label=row.label or PAGE_LABEL, text=clean_markdown(text)),)
    return ()


def _placed(row: PageRow, block: Block) -> Block:
    """The block with its place on the page, which the row knows."""
    return replace(block, box=row.box, is_continued=row.is_continued)


def _is_blank(answer: Answer) -> bool:
    facts = answer.get(PAGE)
    return isinstance(facts, dict) and facts.get("blank") is True
