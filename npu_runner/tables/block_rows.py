"""`npu-runner rows ANSWERS --rows PAGES`: the answers about the layout of pages become rows of their blocks.

A page without a block that can be read is one row, the page, so that no page is lost. Opens no document.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.joined import Joined, requests_in
from npu_runner.batch.files.place import read_by
from npu_runner.errors import ConfigError
from npu_runner.readers.answers.block import Block
from npu_runner.readers.package_prompt import prompt_of
from npu_runner.readers.reader import LabelFields, PageReader, read_reader
from npu_runner.request.limits import LIMITS
from npu_runner.tables.described_rows import DescribedRows, Head, find_place
from npu_runner.tables.first_pass import metadata_of
from npu_runner.tables.options import RowsOptions
from npu_runner.tables.page_answers import BLANK, PageRow, images_of, page_answers, read_page
from npu_runner.tables.places import JobOutput
from npu_runner.tables.row_maker import CHAT, RowLines, fixed_fields, messages_of, shortened

_OPTIONS = {"output", "reader", "rows", "system", "max_tokens", "body", "schema", "prompt_python"}
"""The options that go with --rows."""
_KEPT = ("url", "page", "version")
"""Fields of an address that a block has from its page."""


@dataclass(frozen=True, kw_only=True)
class MadeBlockRows:
    """The result, for the words at the end."""

    output: str
    reader: PageReader
    num_rows: int
    num_pages: int
    num_whole: int
    """Pages that are one row, because no block of them can be read."""
    flaws: Counter[str]

    def to_lines(self) -> list[str]:
        lines = [f"rows      {self.output}: {self.num_rows} rows", f"reader    {self.reader.name}: {self.reader.about}",
                 f"made of   {self.num_rows - self.num_whole} blocks of {self.num_pages - self.num_whole} pages, "
                 f"{self.num_whole} pages without a block to read"]
        if self.flaws:
            lines.append("layouts   " + "; ".join(f"{kind}: {count}" for kind, count in sorted(self.flaws.items())))
        return lines


def make_block_rows(names: Sequence[str], options: RowsOptions) -> MadeBlockRows:
    """Raises ConfigError for answers or rows that do not go together; then the output is as it was before."""
    reader, layout_reader = _readers(names, options)
    maker = _BlockRowMaker(options, reader)
    with contextlib.ExitStack() as entered:
        output = entered.enter_context(JobOutput(names[0], LIMITS.max_row_bytes))
        file = entered.enter_context(InputFile(str(options.rows)))
        read = [*output.read_names, *read_by(options)]
        place = find_place(options.output, read)
        rows = file.scan_for(names[0], None if output.manifest is None else output.manifest.input)
        output.scan()
        output.refuse_other_files()
        joined = Joined(file, rows, output, LIMITS.max_row_bytes)
        if missing := joined.num_rows - len(joined.places):
            raise ConfigError(f"rows {options.rows}: {missing} of {joined.num_rows} pages have no answer in {names[0]} "
                              "yet; finish that job first (a failed page counts as answered)")
        head = Head(reader=reader.name, parser=reader.parser, prompt=None, settings=None)
        described = DescribedRows(place.path, head, is_needed=True)
        num_rows = num_pages = num_whole = 0
        flaws = Counter[str]()
        with place, described.writing(place) as lines:
            requests = requests_in(file, LIMITS.max_row_bytes)
            answers = page_answers(requests_in(file, LIMITS.max_row_bytes), joined, output)
            for request, (row, answer) in zip(requests, answers, strict=True):
                found = read_page(row, answer, layout_reader.parser)
                flaws.update(list(found.flaws))
                blocks: list[tuple[int, Block | None]] = [
                    (number, block) for number, block in enumerate(found.blocks, 1)
                    if block.box is not None and block.label not in reader.unread_labels]
                # A row that shows the whole page will say itself that it is blank.
                layout = "; ".join("is that of a blank page" if kind == BLANK else words
                                   for kind, words in found.flaws.items() if blocks or kind != BLANK)
                for number, block in blocks or [(0, None)]:
                    lines.write(maker.line(request, row, number, block, layout))
                num_rows, num_pages, num_whole = num_rows + max(1, len(blocks)), num_pages + 1, num_whole + (not blocks)
    return MadeBlockRows(output=options.output, reader=reader, num_rows=num_rows, num_pages=num_pages,
                         num_whole=num_whole, flaws=flaws)


def _readers(names: Sequence[str], options: RowsOptions) -> tuple[PageReader, PageReader]:
    """The reader of blocks, and the reader that has found them."""
    if options.reader is None or len(names) != 1:
        raise ConfigError("rows: makes rows of the blocks in the answers of one job; name the answers, and a reader of "
                          "blocks with --reader")
    more = [each.name for each in fields(options)
            if each.name not in _OPTIONS and getattr(options, each.name) != each.default]
    if more:
        raise ConfigError(f"rows: --{more[0].replace('_', '-')} is for rows of records; blocks have the fields of "
                          "their pages and of the reader, so leave it out")
    reader = read_reader(options.reader)
    if reader.after is None:
        raise ConfigError(f"reader {reader.name}: reads pages, not the blocks of answers; leave --rows out")
    return reader, read_reader(reader.after)


class _BlockRowMaker:
    """Makes the rows of the blocks of pages."""

    def __init__(self, options: RowsOptions, reader: PageReader):
        self._reader = reader
        self._system = reader.system if options.system is None else options.system
        default = LabelFields(prompt=prompt_of(reader, options.prompt_python).text)
        self._by_label = {label: (each.prompt, fixed_fields(options, {**reader.body, **each.body}))
                          for label, each in {"": default, **reader.by_label}.items()}
        self._lines = RowLines()

    def line(self, request: Mapping[str, Any], row: PageRow, number: int, block: Block | None,
             layout: str) -> bytes:
        """The row of a block, or of a whole page. `layout`: the flaws of the answer that has found the block."""
        label = "" if block is None else block.label
        prompt, fixed = self._by_label.get(label, self._by_label[""])
        shown = [{"type": "image_url", "image_url": self._address(request, block)}]
        named = metadata_of(request)
        metadata = {"document": row.document, "page": row.page}
        metadata |= {"pages": named["pages"]} if "pages" in named else {}
        custom_id = str(request["custom_id"])
        if block is not None and block.box is not None:
            custom_id = f"{custom_id}{'&' if '#' in custom_id else '#'}block={number}"
            metadata |= {"block": number, "label": label, "box": " ".join(f"{each:g}" for each in block.box)}
            metadata |= {"continued": True} if block.is_continued else {}
        metadata |= {"layout": layout} if layout else {}
        body = {"messages": messages_of(prompt, shown, self._system, self._reader), **fixed, "metadata": metadata}
        return self._lines.line(shortened(custom_id), CHAT, body, f"row {custom_id}")

    def _address(self, request: Mapping[str, Any], block: Block | None) -> dict[str, Any]:
        """The page's address, with the box and the rotation of the block."""
        page = next(images_of(request), None)
        if page is None:
            raise ConfigError(f"row {request.get('custom_id')!r}: shows no image whose blocks could be read")
        named = self._reader.page if "page" in page else self._reader.image
        # The layout's reader gave a resolution to the pages of PDFs alone.
        found = {name: page[name] for name in _KEPT if name in page} | named.to_fields(is_pdf="dpi" in page)
        if block is not None and block.box is not None:
            found["box"] = list(block.box)
            found |= {"rotate": block.rotation} if block.rotation else {}
        return found
