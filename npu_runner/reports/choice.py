"""Which rows a report shows, on which page and in which order: some of each kind, and those with one prompt together.
Reads no row, knows nothing of markup.

No kind can crowd the others out: of 542 failed rows and 358 good ones, a page of 300 shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from npu_runner.reports.reading import ANSWERED, EXPECTED, FAILED
from npu_runner.reports.survey import ORDER, Candidate, Kind, Survey

MAX_CARDS_OF_ONE_FILE = 2000
CARDS_PER_LEAF = 200
# Of the page, for failed rows, for those with flaws and for good ones, as far as there are so many.
_SHARES = (0.4, 0.3, 0.3)
_LEFT_TO = (1, 2, 0)  # what these do not need goes to flaws first, to failed rows last: those repeat each other


@dataclass(frozen=True)
class Group:
    """Rows of one kind with one prompt, or single ones."""

    places: tuple[int, ...]
    has_one_prompt: bool
    """The prompt is said once, above them."""


@dataclass(frozen=True)
class Section:
    """The rows of one kind that are shown."""

    kind: Kind
    num_rows: int
    """That there are."""
    groups: tuple[Group, ...]
    has_one_message: bool = False
    """All of its errors that are shown say the same."""

    @property
    def num_shown(self) -> int:
        return sum(len(group.places) for group in self.groups)


@dataclass(frozen=True)
class Choice:
    sections: tuple[Section, ...]
    common_turns: frozenset[int]
    """Hashes of turns that all rows have: they are said once, at the top."""
    num_media: int

    @property
    def num_rows(self) -> int:
        return sum(section.num_shown for section in self.sections)


def choose(found: Survey, max_rows: int, max_media_per_row: int) -> Choice:
    """At most `max_rows` rows. Sections are in the order of ORDER, failed ones by how many rows they have."""
    numbers = shares(found.kinds, max_rows)
    chosen = {kind: found.candidates[kind][: numbers[kind]] for kind in sorted(found.kinds, key=_rank(found.kinds))}
    common = _common_turns([candidate for rows in chosen.values() for candidate in rows])
    sections = tuple(_section(kind, found.kinds[kind], rows, common) for kind, rows in chosen.items() if rows)
    num_media = sum(min(row.num_media, max_media_per_row) for rows in chosen.values() for row in rows)
    return Choice(sections, common, num_media)


def shares(sizes: Mapping[Kind, int], max_rows: int) -> dict[Kind, int]:
    """How many rows of each kind are shown."""
    tiers = [[kind for kind in sizes if _tier(kind) == tier] for tier in range(len(_SHARES))]
    totals = [sum(sizes[kind] for kind in kinds) for kinds in tiers]
    given = [min(total, int(share * max_rows)) for total, share in zip(totals, _SHARES, strict=True)]
    left = max_rows - sum(given)
    for tier in _LEFT_TO:
        total = totals[tier]
        more = min(total - given[tier], left)
        given[tier], left = given[tier] + more, left - more
    if max_rows > 1 and totals[-1] and not given[-1]:  # a page too small for shares
        given[given.index(max(given))] -= 1
        given[-1] = 1
    return {kind: number for kinds, most in zip(tiers, given, strict=True)
            for kind, number in zip(kinds, evenly([sizes[kind] for kind in kinds], most), strict=True)}


def evenly(sizes: Sequence[int], most: int) -> list[int]:
    """`most` shared out: each gets as many as the others, and what is too much for one goes to the larger ones."""
    given, left = [0] * len(sizes), most
    for number, place in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        given[place] = min(sizes[place], left // (len(sizes) - number))
        left -= given[place]
    return given


def _tier(kind: Kind) -> int:
    if kind.outcome == FAILED:
        return 0
    return 2 if kind.outcome in (EXPECTED, ANSWERED) else 1


def _rank(sizes: Mapping[Kind, int]) -> Callable[[Kind], tuple[int, int, str]]:
    return lambda kind: (ORDER.index(kind.outcome), -sizes[kind], kind.code)


def _common_turns(rows: Sequence[Candidate]) -> frozenset[int]:
    """What every row says that says anything; none where only one does."""
    said = [frozenset(row.turns) for row in rows if row.turns]
    return frozenset.intersection(*said) if len(said) > 1 else frozenset()


def _section(kind: Kind, num_rows: int, rows: Sequence[Candidate], common: frozenset[int]) -> Section:
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_prompt.setdefault(tuple(turn for turn in row.turns if turn not in common), []).append(row.place)
    shared = sorted((places for turns, places in by_prompt.items() if turns and len(places) > 1), 
                    key=lambda places: (-len(places), places[0]))
    single = sorted(place for turns, places in by_prompt.items() if not turns or len(places) == 1 for place in places)
    groups = [Group(tuple(places), True) for places in shared] + [Group(tuple(single), False)] * bool(single)
    messages = {row.message for row in rows}
    return Section(kind, num_rows, tuple(groups),
                   has_one_message=kind.outcome == FAILED and len(rows) > 1 and len(messages) == 1)


@dataclass(frozen=True)
class Part:
    """Of a section, what one page shows."""

    number: int
    """Of the section, from 1."""
    section: Section
    """With the groups of this page alone."""
    num_shown: int
    """On all pages."""
    is_continued: bool
    """From the page before."""


Leaf = tuple[Part, ...]


def cut(sections: Sequence[Section], cards_per_leaf: int) -> list[Leaf]:
    """Pages of so many cards, the last one of fewer; one at least. A group that goes over an edge is one on both
    sides."""
    leaves: list[list[Part]] = [[]]
    room = cards_per_leaf
    for number, section in enumerate(sections, 1):
        is_continued = False
        for group in section.groups:
            places = group.places
            while places:
                if not room:
                    leaves.append([])
                    room = cards_per_leaf
                here, places = places[:room], places[room:]
                room -= len(here)
                _add(leaves[-1], number, section, replace(group, places=here), is_continued=is_continued)
                is_continued = True
    return [tuple(leaf) for leaf in leaves]


def _add(leaf: list[Part], number: int, section: Section, group: Group, *, is_continued: bool) -> None:
    if leaf and leaf[-1].number == number:
        part = leaf[-1]
        leaf[-1] = replace(part, section=replace(part.section, groups=(*part.section.groups, group)))
    else:
        leaf.append(Part(number, replace(section, groups=(group,)), section.num_shown, is_continued))


def places_of(leaf: Leaf) -> list[int]:
    return [place for part in leaf for group in part.section.groups for place in group.places]
