"""Tables in OTSL, a language of table tokens, become HTML. Knows nothing of readers.

Each cell of the grid is one token: <fcel> has text, <ecel> is empty, <lcel> belongs to the cell at its left, <ucel> to
the one above, <xcel> to both. <nl> ends a row.
"""

from __future__ import annotations

import html
import re

from npu_runner.readers.answers.block import PAGE, AnswerError, Block, ParsedAnswer
from npu_runner.readers.answers.markdown_text import clean_markdown

_TOKEN = re.compile("<(fcel|ecel|lcel|ucel|xcel|nl)>")
_MAX_CELLS = 100_000
# A table ends at an empty line behind the end of a row.
_TABLE = re.compile(r"<(?:[felux]cel|nl)>.*?(?:<nl>(?=\s*\n\s*\n(?!\s*<[felux]cel>))|\Z)", re.DOTALL)


def parse_otsl(text: str, label: str) -> ParsedAnswer:
    """Markdown, with its tables in OTSL as HTML."""
    text = _TABLE.sub(lambda found: f"\n\n{html_table(found[0])}\n\n", text)
    return ParsedAnswer(blocks=(Block(label=label or PAGE, text=re.sub(r"\n{3,}", "\n\n", clean_markdown(text))),))


def html_table(text: str) -> str:
    """The table as HTML. Rows that are too short are filled with empty cells. Raises AnswerError where no grid is
    there, or text stands before it."""
    parts = _TOKEN.split(text)
    if len(parts) == 1 or parts[0].strip():
        raise AnswerError("is no table in OTSL: it does not begin with a cell")
    rows: list[list[tuple[str, str]]] = [[]]
    for token, content in zip(parts[1::2], parts[2::2], strict=True):
        if token == "nl":
            rows.append([])
        else:
            rows[-1].append((token, content.strip()))
    rows = [row for row in rows if row]
    num_columns = max(map(len, rows), default=0)
    if not rows or num_columns * len(rows) > _MAX_CELLS:
        raise AnswerError(f"is no table in OTSL: it has {num_columns * len(rows)} cells, and 1 to {_MAX_CELLS} can be")
    grid = [row + [("ecel", "")] * (num_columns - len(row)) for row in rows]
    covered: set[tuple[int, int]] = set()
    lines = []
    for y in range(len(grid)):
        cells = [_cell(grid, covered, x, y) for x in range(num_columns) if (x, y) not in covered]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _cell(grid: list[list[tuple[str, str]]], covered: set[tuple[int, int]], x: int, y: int) -> str:
    """The cell that begins here. It covers the tokens that belong to it, if they have no text of their own. A token
    that belongs to no cell is one itself, so that no text is lost."""

    def is_part(column: int, row: int, *kinds: str) -> bool:
        token, content = grid[row][column]
        return token in kinds and not content and (column, row) not in covered

    right, below = x + 1, y + 1
    while right < len(grid[y]) and is_part(right, y, "lcel", "xcel"):
        right += 1
    while (below < len(grid) and is_part(x, below, "ucel", "xcel")
           and all(is_part(column, below, "lcel", "ucel", "xcel") for column in range(x + 1, right))):
        below += 1
    covered.update((column, row) for row in range(y, below) for column in range(x, right))
    spans = f' rowspan="{below - y}"' * (below - y > 1) + f' colspan="{right - x}"' * (right - x > 1)
    return f"<td{spans}>{html.escape(grid[y][x][1], quote=False)}</td>"
