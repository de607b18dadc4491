"""`npu-runner rows`: sources in, the input of a job out, whole or not at all."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from npu_runner.batch.files.answer_file import has_twins
from npu_runner.batch.files.place import read_by
from npu_runner.batch.files.row_book import keys_array
from npu_runner.batch.rows.input_row import row_key
from npu_runner.errors import ConfigError
from npu_runner.tables.media_files import MediaFolder
from npu_runner.tables.options import RowsOptions
from npu_runner.tables.places import find_outputs
from npu_runner.tables.prompt_text import PromptText
from npu_runner.tables.records import Reader, Record
from npu_runner.tables.row_maker import RowMaker
from npu_runner.tables.sources import Sources, find_sources

_MOST_KINDS = 10


@dataclass(frozen=True, kw_only=True)
class MadeRows:
    """What was made, for the words at the end."""

    options: RowsOptions
    num_rows: int
    made_of: Counter[tuple[str, str]]
    """Images, videos and records, and of which file the latter are."""
    num_without_media: int
    not_shown: dict[str, str]
    media: MediaFolder
    sources: Sources

    def to_lines(self) -> list[str]:
        lines = [f"rows      {self.options.output}: {self.num_rows} rows"]
        kinds = [f"{count} {kind}{'s' if count > 1 else ''}{where}" for (kind, where), count in self.made_of.items()]
        more = f", {len(kinds) - _MOST_KINDS} others" if len(kinds) > _MOST_KINDS else ""
        lines.append(f"made of   {', '.join(kinds[:_MOST_KINDS])}{more}")
        if self.media.num_written:
            lines.append(f"images    {self.media.num_written} written below {self.media.root}")
        if self.num_without_media:
            lines.append(f"          {self.num_without_media} rows show no image or video: theirs is empty")
        lines += [f"not shown column {name!r}: {kind}; --image or --video shows a column"
                  for name, kind in self.not_shown.items()]
        if missing := self.media.missing_line():
            lines.append(f"missing   {missing}")
        if left_out := self.sources.left_out_line():
            lines.append(f"left out  {left_out}")
        return [*lines, f"next      {self._next_command()}"]

    def _next_command(self) -> str:
        words = ["npu-runner", "batch", "-i", self.options.output, "-o", "answers.jsonl", "--model", "MODEL"]
        if self.media.is_used:
            words += ["--allowed-media-dir", os.fsencode(self.media.root).decode("utf-8", "backslashreplace")]
        return " ".join(map(shlex.quote, words))


def make_rows(names: Sequence[str], options: RowsOptions) -> MadeRows:
    """Raises ConfigError for whatever cannot be a row; then the output is as it was before."""
    sources = find_sources(names)
    media = _media_folder(sources, options)
    prompt = PromptText(options)
    maker = RowMaker(options, prompt, media)
    reader = Reader(sources, delimiter=options.delimiter, encoding=options.encoding, needed=maker.needed)
    (place,) = find_outputs([("rows", options.output)], [*read_by(options), *(("source", name) for name in names)])
    sources.output = place.path

    def records() -> Iterator[Record]:
        return reader.records() if options.sample is None else reader.sample(options.sample)

    keys, made_of = bytearray(), Counter[tuple[str, str]]()
    with place, place.writing() as file:
        for record in records():
            custom_id, line = maker.row(record)
            keys += row_key(custom_id, 0)
            made_of[_what(record)] += 1
            file.write(line)
        if not keys:
            left_out = f"; left out: {found}" if (found := sources.left_out_line()) else ""
            raise ConfigError(f"source {', '.join(map(repr, names))}: there is no record in it, so there are no "
                              f"rows{left_out}")
        _refuse_twins(keys, records, maker)
        media.sync()
    return MadeRows(options=options, num_rows=len(keys_array(keys)), made_of=made_of, media=media,
                    num_without_media=maker.num_without_media, not_shown=maker.not_shown, sources=sources)


def _what(record: Record) -> tuple[str, str]:
    return ("record", f" of {record.id.rpartition('#')[0]}") if record.file is None else (record.file.kind, "")


def _media_folder(sources: Sources, options: RowsOptions) -> MediaFolder:
    if options.media_dir is None:
        return MediaFolder(sources.root, is_named=False)
    if not options.media_dir.is_dir():
        raise ConfigError(f"media_dir: {str(options.media_dir)!r} is not a folder; make it first")
    return MediaFolder(str(options.media_dir), is_named=True)


def _refuse_twins(keys: bytearray, records: Callable[[], Iterator[Record]], maker: RowMaker) -> None:
    """Raises ConfigError for a custom_id that two records have, and names both."""
    all_keys = keys_array(keys)
    if not has_twins(all_keys):
        return
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
