"""The report of a job's answers: one HTML file, for looking. Knows nothing of the engine.

Reads the output and the input again, a row at a time, so it shows resumed rows as well and holds only what is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.joined import Joined
from npu_runner.batch.files.place import Place
from npu_runner.batch.rows.openai_response import name_of_answer
from npu_runner.errors import JobError
from npu_runner.reports.cards import MAX_MEDIA_PER_ROW, Card, card_of
from npu_runner.reports.choice import MAX_CARDS_OF_ONE_FILE, Leaf, choose, cut, places_of
from npu_runner.reports.head import About
from npu_runner.reports.pages import Address, Book, ShownPicture, data_url
from npu_runner.reports.reading import Medium, anchor_of
from npu_runner.reports.survey import survey
from npu_runner.reports.thumbnails import Picture, PictureMaker, ThumbnailMaker, side_for
from npu_runner.reports.vectors import MAX_COMPARED, neighbours, vectors_in
from npu_runner.serving.workers.pool import PoolLimits

PICTURE_BYTES = 3 << 20
"""For all pictures of one file, in base64 a third more: the more there are, the smaller they are made."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a report is made from. `file` and `rows`: the input, None where it is not there. `name`: of the output.
    `outputs`: the file of answers, and that of failed rows behind it, where there is one."""

    file: InputFile | None
    rows: InputScan | None
    name: str
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

    `worker` bounds what decodes images. Raises JobError, whatever goes wrong: no answer is touched.
    """
    missing = f"No answer in {source.name} is affected; the report alone is missing"
    try:
        with target.late_errors():
            _Report(target, source, thumbnails, worker, max_rows).write()
    except JobError as error:
        raise JobError(f"{error}. {missing}") from error
    except Exception as error:  # the border where a fault of the page becomes a reported failure
        raise JobError(f"{target.title}: cannot be made ({type(error).__name__}: {error}). {missing}") from error


class _Report:
    """One report while it is written."""

    def __init__(self, target: Place, source: Source, thumbnails: ThumbnailMaker, worker: PoolLimits, max_rows: int):
        self._target = target
        self._source = source
        self._thumbnails = thumbnails
        self._worker = worker
        self._max_rows = min(max_rows, MAX_CARDS_OF_ONE_FILE)
        self._joined = Joined(source.file, source.rows, source.outputs, source.max_row_bytes, source.ends)

    def write(self) -> None:
        found = survey(self._joined, self._max_rows, has_schema=self._source.has_schema)
        choice = choose(found, self._max_rows, MAX_MEDIA_PER_ROW)
        leaves = cut(choice.sections, MAX_CARDS_OF_ONE_FILE)
        self._near, addresses = self._neighbours(leaves) if found.vectors.num_of_length else ({}, {})
        book = Book(output=self._source.name, num_rows=self._joined.num_rows, found=found, choice=choice,
                    has_input=self._joined.has_input, leaves=leaves, about=self._source.about, version=None,
                    addresses=addresses)
        side = side_for(choice.num_media, PICTURE_BYTES)
        with PictureMaker(replace(self._thumbnails, side=side), self._worker) as maker:
            cards, pictures = self._cards(leaves[0], maker)
            shown = {key: ShownPicture(data_url(picture.data), picture.width, picture.height)
                     for key, picture in pictures.items()}
            with self._target.writing() as file:
                book.write(1, cards, shown, file)

    def _cards(self, leaf: Leaf, maker: PictureMaker) -> tuple[dict[int, Card], dict[str, Picture]]:
        """The cards by their places, in the order of the page, and their pictures."""
        cards: dict[int, Card] = {}
        places = places_of(leaf)
        pictures = maker.make(self._lay_out(np.sort(np.array(places, dtype=np.int64)), cards))
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
