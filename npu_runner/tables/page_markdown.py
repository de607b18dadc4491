"""The Markdown of documents, and the table of their blocks, from the answers about their pages.

Each page starts with a comment, and a page without a whole answer says why in another one. Both are a function of rows
and answers, made anew each time; the file of a document that has no rows any more stays.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from npu_runner.batch.files.place import Place
from npu_runner.batch.rows.logprobs_json import encoded
from npu_runner.readers.answers.block import Block, markdown_of
from npu_runner.readers.answers.parsers import PARSERS
from npu_runner.readers.reader import read_reader
from npu_runner.tables.column_types import DOUBLE, INT64, LIST, TEXT
from npu_runner.tables.described_rows import documents_path
from npu_runner.tables.first_pass import Answer
from npu_runner.tables.markdown_files import MarkdownFolder
from npu_runner.tables.options import TableOptions
from npu_runner.tables.page_answers import BLANK, LAYOUT, NO_ANSWER, UNCOUNTED, PageAnswer, PageRow, read_page
from npu_runner.tables.table_writers import text_writer

BLOCK_COLUMNS = {"document": TEXT, "page": INT64, "label": TEXT, "box": LIST + DOUBLE, "text": TEXT}
_MOST_HEAD_BYTES = 1 << 20


@dataclass
class PageCounts:
    """Numbers of documents, pages and blocks. `flaws`: numbers of pages by flaw."""

    num_documents: int = 0
    num_with_gaps: int = 0
    num_pages: int = 0
    num_blocks: int = 0
    flaws: Counter[str] = field(default_factory=Counter)

    @property
    def flaw_words(self) -> str:
        return "".join(f"; {kind}: {count}" for kind, count in sorted(self.flaws.items()))


def write_pages(answers: Iterable[tuple[PageRow, Answer | None]], options: TableOptions, parser: str,
                folder: MarkdownFolder | None, place: Place | None) -> tuple[list[str], PageCounts]:
    """Returns the words about the files, and the counts. The rows of each document stand together, as those of each
    page. `folder`: of Markdown; `place`: of the table of blocks; None: it is not written."""
    counts, table = PageCounts(), None
    with contextlib.ExitStack() as entered:
        if place is not None:
            stream = entered.enter_context(place.writing())
            table = text_writer(str(options.kind_of_blocks), options.excel_safe)(stream, BLOCK_COLUMNS)
        for document, of_document in itertools.groupby(answers, key=lambda pair: pair[0].document):
            has_gaps = False
            with contextlib.nullcontext() if folder is None else folder.writing(document) as file:
                for page, of_page in itertools.groupby(of_document, key=lambda pair: pair[0].page):
                    blocks, marks, flaws = _read_rows(page, of_page, parser)
                    has_gaps |= bool(flaws - {BLANK})
                    counts.num_pages += 1
                    counts.num_blocks += len(blocks)
                    counts.flaws.update(flaws)
                    if file is not None:
                        text = markdown_of(blocks)
                        marked = "".join(f"<!-- {mark} -->\n" for mark in dict.fromkeys(marks))
                        file.write(encoded("\n" * (file.tell() > 0) + marked + (f"\n{text}\n" if text else "")))
                    if table is not None:
                        for block in blocks:
                            box = None if block.box is None else list(block.box)
                            table.write({"document": document, "page": page, "label": block.label, "box": box,
                                         "text": block.text})
            counts.num_documents += 1
            counts.num_with_gaps += has_gaps
        if table is not None:
            table.finish()
    lines = []
    if folder is not None:
        lines.append(f"markdown  {options.markdown}: {counts.num_pages} pages of {counts.num_documents} documents, "
                     f"{counts.num_with_gaps} of them with gaps{counts.flaw_words}")
    if table is not None:
        lines.append(f"blocks    {options.blocks}: {counts.num_blocks} blocks of {counts.num_pages} pages")
    return lines, counts


def _read_rows(page: int, rows: Iterable[tuple[PageRow, Answer | None]],
               parser: str) -> tuple[list[Block], list[str], set[str]]:
    """The blocks of a page, its comments, and its flaws."""
    blocks, marks, flaws = list[Block](), [f"page {page}"], set[str]()
    for row, answer in rows:
        read = read_page(row, answer, parser)
        blocks += read.blocks
        flaws |= read.flaws.keys() | ({LAYOUT} if row.layout else set())
        marks += _marks(row, read)
        if row.is_uncounted and NO_ANSWER not in read.flaws:
            flaws.add(UNCOUNTED)
            marks.append(f"page {page} may not be the last one: the document did not open when its rows were made, so "
                         "make its rows anew")
    return blocks, marks, flaws


def _marks(row: PageRow, read: PageAnswer) -> Iterator[str]:
    if row.layout:
        yield _comment(f"page {row.page}: its layout {row.layout}")
    words = list(read.flaws.values())
    if read.rotation:
        words.append(f"is upright after a rotation by {read.rotation} degrees clockwise, as its reader says")
    where = f"page {row.page}" if row.block is None else f"page {row.page}, block {row.block}"
    yield from (_comment(f"{where} {each}") for each in words)


def _comment(text: str) -> str:
    """The text may quote an answer, and a comment ends at its first two hyphens and >."""
    return re.sub(r"[<>\x00-\x1f]|-{2,}", " ", text)


def find_parser(reader: str | None, rows: str) -> str:
    """The name of the parser of a reader's answers. None: that which the file beside the rows names; plain Markdown
    without such a file. Raises ConfigError for a reader that is not known."""
    if reader is not None:
        return read_reader(reader).parser
    parser, path = None, documents_path(Path(rows))
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError), open(path, "rb") as file:
        parser = json.loads(file.readline(_MOST_HEAD_BYTES)).get("parser")
    return parser if parser in PARSERS else "markdown"
