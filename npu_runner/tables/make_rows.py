"""`npu-runner rows`: sources in, the input of a job out, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from npu_runner.batch.files.answer_file import has_twins
from npu_runner.batch.files.place import read_by
from npu_runner.batch.files.row_book import keys_array
from npu_runner.batch.rows.logprobs_json import to_json
from npu_runner.batch.rows.shape import row_key
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.pdf_passwords import read_passwords
from npu_runner.readers.package_prompt import ReaderPrompt
from npu_runner.readers.reader import PageReader
from npu_runner.serving.options import num_cpus
from npu_runner.serving.workers.pool import PoolLimits
from npu_runner.tables.described_rows import DescribedRows, Head, find_place
from npu_runner.tables.document_pages import DocumentOpener, Documents, PageRanges
from npu_runner.tables.media_files import MediaFolder
from npu_runner.tables.options import RowsOptions
from npu_runner.tables.prompt_text import PromptText, find_page_reader
from npu_runner.tables.records import Reader, Record
from npu_runner.tables.row_maker import RowMaker
from npu_runner.tables.sources import Sources, find_sources

_MOST_KINDS = 10
_PAGE = ("page", "")
# Options that decide the rows of a document, beside the texts of prompt, reader, schema and body.
_DECIDE = ("system", "image", "video", "id", "keep", "expected", "kind", "endpoint", "pages", "dpi",
           "sample")


@dataclass(frozen=True, kw_only=True)
class MadeRows:
    """The result, for the words at the end."""

    options: RowsOptions
    num_rows: int
    made_of: Counter[tuple[str, str]]
    """Numbers of pages, of images, of videos, and of the records of each file."""
    num_without_media: int
    not_shown: dict[str, str]
    media: MediaFolder
    sources: Sources
    described: DescribedRows
    reader: PageReader | None

    def to_lines(self) -> list[str]:
        lines = [f"rows      {self.options.output}: {self.num_rows} rows"]
        if self.reader is not None:
            lines.append(f"reader    {self.reader.name}: {self.reader.about}")
        kinds = [f"{_counted(count, kind)}{where}" for (kind, where), count in self.made_of.items()]
        more = f", {len(kinds) - _MOST_KINDS} others" if len(kinds) > _MOST_KINDS else ""
        lines.append(f"made of   {', '.join(kinds[:_MOST_KINDS]) or 'nothing new'}{more}")
        if self.media.num_written:
            lines.append(f"images    {self.media.num_written} written below {self.media.root}")
        if self.num_without_media:
            lines.append(f"          {self.num_without_media} rows show no image or video: theirs is empty")
        lines += [f"not shown column {name!r}: {kind}; --image or --video shows a column"
                  for name, kind in self.not_shown.items()]
        lines += self._lines_of_documents()
        if missing := self.media.missing_line():
            lines.append(f"missing   {missing}")
        if left_out := self.sources.left_out_line():
            lines.append(f"left out  {left_out}")
        return [*lines, f"next      {self._next_command()}"]

    def _lines_of_documents(self) -> Iterator[str]:
        described = self.described
        if unread := described.unread_line():
            yield f"left out  {unread}"
        if errors := described.errors:
            codes = ", ".join(f"{count} {code}" for code, count in Counter(errors.values()).most_common(_MOST_KINDS))
            yield (f"broken    {_counted(len(errors), 'document')} did not open ({codes}), as {next(iter(errors))!r}: "
                   "each has one row, which fails by name unless a password opens it; a mended one is added under "
                   "another name, or with all rows made anew")
        if gone := described.gone:
            yield (f"gone      {_counted(len(gone), 'document')}, as {gone[0]!r}: not among the sources, and the rows "
                   "are kept")

    def _next_command(self) -> str:
        words = ["npu-runner", "batch", "-i", self.options.output, "-o", "answers.jsonl", "--model",
                 str(self.options.model or "MODEL")]
        if self.media.is_used:
            words += ["--allowed-media-dir", os.fsencode(self.media.root).decode("utf-8", "backslashreplace")]
        if self.options.pdf_passwords is not None:
            words += ["--pdf-passwords", str(self.options.pdf_passwords)]
        return " ".join(map(shlex.quote, words))


def make_rows(names: Sequence[str], options: RowsOptions, *, results: Path | None = None) -> MadeRows:
    """Raises ConfigError for a record that cannot be a row; then the output is as it was before. `results`: the folder
    of the results of `read`. No file in it is a source, and the file of documents is written without documents, too."""
    sources = find_sources(names, results)
    media = _media_folder(sources, options)
    reader, asked = find_page_reader(options)
    prompt = PromptText(options, None if asked is None else asked.text)
    maker = RowMaker(options, prompt, media, reader, names_versions=results is not None)
    read = [*read_by(options), *(("source", name) for name in names)]
    place = find_place(options.output, read)
    sources.output = place.path
    ranges = PageRanges.parse(options.pages)
    described = DescribedRows(place.path, _head(options, reader, asked, prompt, maker, sources),
                              appended=ranges if options.append else None,
                              is_needed=results is not None or reader is not None)
    opener = DocumentOpener(ranges=ranges, page=maker.page, passwords=read_passwords(options.pdf_passwords))
    documents = Documents(opener, _limits(options), described.has, media.address)
    records = Reader(sources, documents, delimiter=options.delimiter, encoding=options.encoding, needed=maker.needed)
    keys, made_of, num_known = bytearray(), Counter[tuple[str, str]](), 0
    with place, described.writing(place) as file:
        for custom_id, line in described.earlier_rows():
            keys += row_key(custom_id, 0)
            file.write(line)
        earlier = np.sort(keys_array(bytes(keys)))
        chosen = (records.records(described.add) if options.sample is None
                  else records.sample(options.sample, described.add))
        with contextlib.closing(chosen):  # with its worker processes
            for record in chosen:
                if record.document is not None:
                    described.refuse_grown_image(str(record.columns["path"]))
                custom_id, line = maker.row(record)
                key = row_key(custom_id, 0)
                if options.append and _is_in(earlier, key, record):
                    num_known += 1
                    continue
                keys += key
                made_of[_kind(record)] += 1
                file.write(line)
        if not keys:
            found = [line for line in (sources.left_out_line(), described.unread_line()) if line]
            left_out = f"; left out: {'; '.join(found)}" if found else ""
            raise ConfigError(f"source {', '.join(map(repr, names))}: there is no record in it, so there are no "
                              f"rows{left_out}")
        described.refuse_other_folder(has_earlier_images=num_known > 0)
        _refuse_twins(keys, records.records, maker, is_appended=options.append)
        media.sync()
    if num_pages := made_of.pop(_PAGE, 0):
        where = f" of {_counted(described.num_documents, 'document')}"
        made_of = Counter({("page", where): num_pages, **made_of})
    return MadeRows(options=options, num_rows=len(keys_array(keys)), made_of=made_of, media=media, described=described,
                    num_without_media=maker.num_without_media, not_shown=maker.not_shown, sources=sources,
                    reader=reader)


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}{'s' if count != 1 else ''}"


def _kind(record: Record) -> tuple[str, str]:
    if record.file is None:
        return "record", f" of {record.id.rpartition('#')[0]}"
    return _PAGE if record.document is not None else (record.file.kind, "")


def _is_in(earlier: np.ndarray, key: bytes, record: Record) -> bool:
    """Whether earlier rows have this image or page. Documents with a line were left out before. Raises ConfigError for
    a table."""
    if record.file is None:
        raise ConfigError(f"append: {record.where} is a record of a table; documents, images and videos are added, so "
                          "make the rows of tables anew")
    place = int(np.searchsorted(earlier, np.array(key, dtype=earlier.dtype)))
    return place < len(earlier) and bool(earlier[place] == np.array(key, dtype=earlier.dtype))


def _head(options: RowsOptions, reader: PageReader | None, asked: ReaderPrompt | None, prompt: PromptText,
          maker: RowMaker, sources: Sources) -> Head:
    decide = [prompt.source, maker.fixed, None if reader is None else reader.to_json(),
              *(str(getattr(options, name)) for name in _DECIDE)]
    origin: dict[str, str | None] | None = None
    if prompt.source is not None and options.template is None:
        origin = {"package": None if asked is None else asked.package,
                  "version": None if asked is None else asked.version,
                  "sha256": hashlib.sha256(prompt.source.encode("utf-8", "surrogatepass")).hexdigest()}
    return Head(reader=None if reader is None else reader.name, parser=None if reader is None else reader.parser,
                prompt=origin, root=sources.shown_root,
                settings=hashlib.blake2b(to_json(decide).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest())


def _limits(options: RowsOptions) -> PoolLimits:
    workers = options.workers
    return PoolLimits(num_workers=workers.num_workers(num_cpus()), task_timeout_seconds=workers.preprocessing_timeout,
                      worker_memory_bytes=workers.worker_memory_bytes)


def _media_folder(sources: Sources, options: RowsOptions) -> MediaFolder:
    if options.media_dir is None:
        return MediaFolder(sources.root, is_named=False)
    if not options.media_dir.is_dir():
        raise ConfigError(f"media_dir: {str(options.media_dir)!r} is not a folder; make it first")
    return MediaFolder(str(options.media_dir), is_named=True)


def _refuse_twins(keys: bytearray, records: Callable[[], Iterator[Record]], maker: RowMaker, *,
                  is_appended: bool) -> None:
    """Raises ConfigError for a custom_id that two records have, and names both."""
    all_keys = keys_array(keys)
    if not has_twins(all_keys):
        return
    if is_appended:
        raise ConfigError("append: a new row has the custom_id of another row, and answers are matched by it; name "
                          "another --id, or make all rows anew")
    order = np.argsort(all_keys, kind="stable")
    (repeats,) = np.nonzero(all_keys[order][1:] == all_keys[order][:-1])
    first, second = int(order[repeats[0]]), int(order[repeats[0] + 1])
    named: list[tuple[str, str]] = []
    for place, record in enumerate(records()):
        if place in (first, second):
            named.append((maker.row(record)[0], record.where))
    more = f"; {len(repeats)} ids in all are there twice" if len(repeats) > 1 else ""
    raise ConfigError(f"custom_id {named[0][0]!r}: is that of {named[0][1]} and of {named[1][1]}, and answers are "
                      f"matched by it; name another --id, or none{more}")
