"""Reads the two answers of MinerU: the layout of a page, and the content of one block. Knows nothing of rows."""

from __future__ import annotations

import re

from npu_runner.readers.answers.block import PAGE, AnswerError, Block, Box, ParsedAnswer, box_of
from npu_runner.readers.answers.markdown_text import clean_markdown
from npu_runner.readers.answers.otsl import html_table

LABELS = frozenset({
    "text", "title", "doc_title", "paragraph_title", "table", "equation", "formula_number", "code", "algorithm",
    "aside_text", "ref_text", "index", "phonetic", "list_item", "caption", "table_caption", "image_caption",
    "code_caption", "footnote", "table_footnote", "image_footnote", "page_footnote", "header", "footer", "page_number",
    "image", "chart", "list", "image_block", "equation_block"})
NOT_READ = frozenset({"list", "equation_block", "image_block", "image", "chart"})
"""Labels of blocks that contain other blocks, or nothing that is read."""
_START = "<|box_start|>"
_BLOCK = re.compile(r"(\d+)\s+(\d+)\s+(\d+)\s+(\d+)<\|box_end\|><\|ref_start\|>(\w+)<\|ref_end\|>"
                    r"(?:<\|rotate_(up|right|down|left)\|>)?")
_ROTATIONS = {"up": 0, "right": 270, "down": 180, "left": 90}
"""The clockwise rotation that makes a block upright, by the side to which its upper edge has turned."""
_CONTINUES = "txt_contd_tgt"
_SPECIAL = re.compile(r"<\|[a-z_]+\|>")
_SAME, _INSIDE = 0.9, 0.9
_HEADINGS = {"doc_title": "# ", "title": "# ", "paragraph_title": "## "}
_NO_TEXT = "[Non-Text]"


def parse_layout(text: str, label: str) -> ParsedAnswer:
    """Blocks without text. A block that lies on another one of its kind is left out, as is text within a table. Raises
    AnswerError where the answer is no layout; an empty one is a page without blocks."""
    blocks: list[Block] = []
    parts = text.split(_START)[1:]
    found = [(match, part[match.end():]) for part in parts if (match := _BLOCK.match(part))]
    if not found and _SPECIAL.sub("", text).strip():
        raise AnswerError(f"is no layout: it has no block of the form {_START}x0 y0 x1 y1<|box_end|>")
    for match, tail in found:
        *numbers, name, turn = match.groups()
        name = "image" if name.lower() == "unknown" else name.lower()
        box = box_of(numbers) if all(len(number) <= 4 and int(number) <= 1000 for number in numbers) else None
        if box is None or name not in LABELS:
            continue
        block = Block(label=name, text="", box=box, rotation=_ROTATIONS.get(turn, 0),
                      is_continued=name == "text" and _CONTINUES in tail)
        if not any(_is_same(block, other) for other in blocks):
            blocks.append(block)
    tables = [block.box for block in blocks if block.label == "table" and block.box]
    return ParsedAnswer(blocks=tuple(block for block in blocks if not _is_in_table(block, tables)))


def parse_block(text: str, label: str) -> ParsedAnswer:
    """The content of a block with this label of a layout. Raises AnswerError for a table that is none."""
    text = clean_text(text)
    if label == "table" and text:
        text = html_table(text) if not text.lower().startswith("<table") else text
    elif label == "equation" and text:
        text = f"$$\n{_without_delimiters(text)}\n$$"
    elif label in ("code", "algorithm") and text and not text.startswith("```"):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        text = f"{fence}\n{text}\n{fence}"
    elif text and "\n" not in text:
        text = _HEADINGS.get(label, "") + text
    return ParsedAnswer(blocks=(Block(label=label or PAGE, text=clean_markdown(text)),))


def clean_text(text: str) -> str:
    """The text without special tokens, which this reader's answers keep. The tokens of tables stay."""
    text = _SPECIAL.sub("", text).strip()
    return "" if text == _NO_TEXT else text


def _without_delimiters(formula: str) -> str:
    for start, end in (("\\[", "\\]"), ("$$", "$$"), ("\\(", "\\)")):
        formula = formula.removeprefix(start).removesuffix(end).strip()
    return re.sub(r"\n\s*\n", "\n", formula.replace("$$", ""))


def _is_same(block: Block, other: Block) -> bool:
    if (block.label, block.rotation) != (other.label, other.rotation) or block.box is None or other.box is None:
        return False
    common = _common_area(block.box, other.box)
    return common > _SAME * (_area(block.box) + _area(other.box) - common)


def _is_in_table(block: Block, tables: list[Box]) -> bool:
    if block.label not in ("text", "equation", "equation_block") or block.box is None:
        return False
    return any(_common_area(block.box, table) >= _INSIDE * _area(block.box) for table in tables)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _common_area(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)
