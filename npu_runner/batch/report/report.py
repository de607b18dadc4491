"""The report of a job's answers, as one HTML file or as a folder of pages, for looking. Knows nothing of the engine.

Reads the output and the input again, a row at a time, so it shows resumed rows as well and holds only what is shown: of
a folder, one page after the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.folder_place import FolderPlace, Version
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.joined import Joined
from npu_runner.batch.files.place import Place
from npu_runner.batch.report.cards import MAX_MEDIA_PER_ROW, Card, card_of
from npu_runner.batch.report.choice import CARDS_PER_LEAF, MAX_CARDS_OF_ONE_FILE, Leaf, choose, cut, places_of
from npu_runner.batch.report.head import About
from npu_runner.batch.report.pages import Address, Book, ShownPicture, data_url
from npu_runner.batch.report.reading import Medium, anchor_of
from npu_runner.batch.report.survey import survey
from npu_runner.batch.report.thumbnails import Picture, PictureMaker, ThumbnailMaker, side_for
from npu_runner.batch.report.vectors import MAX_COMPARED, neighbours, vectors_in
from npu_runner.batch.rows.openai_response import name_of_answer
from npu_runner.errors import JobError
from npu_runner.serving.workers.pool import PoolLimits

PICTURE_BYTES = 3 << 20
"""For all pictures of one file, in base64 a third more: the more there are, the smaller they are made."""
PICTURE_BYTES_OF_FOLDER = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a report is made from. `file` and `rows`: the input, None where it is not there. `outputs`: the file of
    answers, and that of failed rows behind it, where there is one."""

    file: InputFile | None
    rows: InputScan | None
    outputs: Sequence[Path]
    max_row_bytes: int
    """Of a request above it nothing is shown but its answer."""
    ends: Sequence[int] | None = None
    """Bytes of each output that are read; None: all that are there."""
    has_schema: bool = False
    """The job has one for rows that say nothing of their answer."""
    about: About | None = None


def write_report(target: Place, source: Source, *, thumbnails: ThumbnailMaker, worker: PoolLimits,
                 max_rows: int) -> None:
    """Write the report. Of a huge job it shows `max_rows` rows, some of each kind, and says so.

    `target`: a FolderPlace becomes a folder of pages; anything else is one file, of MAX_CARDS_OF_ONE_FILE rows at
    most. `worker` bounds what decodes images. Raises JobError, whatever goes wrong: no answer is touched.
    """
    output = source.outputs[0]
    missing = f"No answer in {output} is affected; the report alone is missing"
    try:
        answers = AnswerFile(source.outputs, ends=source.ends, file_errors=late_file_errors)
        with target.late_errors(), answers:
            if answers.scan().states[0] is None:
                raise JobError(f"output {output}: is not there any more")
            _Report(target, source, answers, thumbnails, worker, max_rows).write()
    except JobError as error:
        raise JobError(f"{error}. {missing}") from error
    except Exception as error:  # the border where a fault of the page becomes a reported failure
        raise JobError(f"{target.title}: cannot be made ({type(error).__name__}: {error}). {missing}") from error


class _Report:
    """One report while it is written."""

    def __init__(self, target: Place, source: Source, answers: AnswerFile, thumbnails: ThumbnailMaker,
                 worker: PoolLimits, max_rows: int):
        self._target = target
        self._source = source
        self._thumbnails = thumbnails
        self._worker = worker
        is_folder = isinstance(target, FolderPlace)
        self._max_rows = max_rows if is_folder else min(max_rows, MAX_CARDS_OF_ONE_FILE)
        self._cards_per_leaf = CARDS_PER_LEAF if is_folder else MAX_CARDS_OF_ONE_FILE
        self._picture_bytes = PICTURE_BYTES_OF_FOLDER if is_folder else PICTURE_BYTES
        self._joined = Joined(source.file, source.rows, answers, source.max_row_bytes)

    def write(self) -> None:
        found = survey(self._joined, self._max_rows, has_schema=self._source.has_schema)
        choice = choose(found, self._max_rows, MAX_MEDIA_PER_ROW)
        leaves = cut(choice.sections, self._cards_per_leaf)
        self._near, addresses = self._neighbours(leaves) if found.vectors.num_of_length else ({}, {})
        book = Book(output=self._source.outputs[0].name, num_rows=self._joined.num_rows, found=found, choice=choice,
                    has_input=self._joined.has_input, leaves=leaves, about=self._source.about, version=None,
                    addresses=addresses)
        side = side_for(choice.num_media, self._picture_bytes)
        with PictureMaker(replace(self._thumbnails, side=side), self._worker) as maker:
            if isinstance(self._target, FolderPlace):
                with self._target.next_version() as version:
                    self._write_folder(replace(book, version=version.name), version, maker)
                return
            cards, pictures = self._cards(leaves[0], maker)
            shown = {key: ShownPicture(data_url(picture.data), picture.width, picture.height)
                     for key, picture in pictures.items()}
            with self._target.writing() as file:
                book.write(1, cards, shown, file)

    def _write_folder(self, book: Book, version: Version, maker: PictureMaker) -> None:
        """The first page last: the index is what makes the others count."""
        ids: list[list[Address]] = [[] for _ in book.leaves]
        sizes: dict[str, tuple[int, int]] = {}
        for number in range(len(book.leaves), 0, -1):
            leaf = book.leaves[number - 1]
            cards, pictures = self._cards(leaf, maker, known=sizes)
            ids[number - 1] = [Address(cards[place].name, cards[place].anchor, number) for place in places_of(leaf)]
            folder = f"{version.name}/" if number == 1 else ""
            for key, picture in pictures.items():
                sizes[key] = picture.width, picture.height
                with version.page(f"{key}.jpg") as file:
                    file.write(picture.data)
            keys = {key for card in cards.values() for key, *_ in card.media} & sizes.keys()
            shown = {key: ShownPicture(f"{folder}{key}.jpg", *sizes[key]) for key in keys}
            if number > 1:
                with version.page(f"{number}.html") as file:
                    book.write(number, cards, shown, file)
            else:
                with version.writing_index() as file:
                    book.write(1, cards, shown, file, ids=ids if len(ids) > 1 else ())

    def _cards(self, leaf: Leaf, maker: PictureMaker,
               known: Container[str] = ()) -> tuple[dict[int, Card], dict[str, Picture]]:
        """The cards of a page by their places, in the order of the page, and their pictures but for `known` ones."""
        cards: dict[int, Card] = {}
        places = places_of(leaf)
        pictures = maker.make(self._lay_out(np.sort(np.array(places, dtype=np.int64)), cards), known)
        return {place: cards[place] for place in places}, pictures

    def _lay_out(self, places: np.ndarray, cards: dict[int, Card]) -> Iterator[Medium]:
        """Make the cards on the way; yields the media whose pictures they lack."""
        for place, (request, answer) in zip(places.tolist(), self._joined.pairs(places), strict=True):
            card, asked = card_of(place, request, answer, has_schema=self._source.has_schema)
            for vector, near in zip(card.vectors, self._near.get(place, ()), strict=False):
                vector.neighbours.extend(near)
            cards[place] = card
            yield from asked.media[:MAX_MEDIA_PER_ROW]

    def _neighbours(self, leaves: Sequence[Leaf]) -> tuple[Mapping[int, Any], Mapping[int, Address]]:
        """By place, the vectors nearest to the row's first one; and where those rows are, by the vectors' numbers."""
        leaf_of = {place: number for number, leaf in enumerate(leaves, 1) for place in places_of(leaf)}
        vectors: list[np.ndarray] = []
        owners: list[tuple[int, Address]] = []
        places = np.array(sorted(leaf_of), dtype=np.int64)
        for place, (_, answer) in zip(places.tolist(), self._joined.pairs(places), strict=True):
            found = vectors_in(answer)
            if found and len(vectors) < MAX_COMPARED:
                vectors.append(found[0])
                owners.append((place, Address(name_of_answer(answer), anchor_of(answer), leaf_of[place])))
        near = neighbours(vectors)
        return ({place: [near[number]] for number, (place, _) in enumerate(owners)},
                {number: address for number, (_, address) in enumerate(owners)})
