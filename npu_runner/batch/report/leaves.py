"""Cuts what is chosen into the pages of a folder. One file is one page. Knows nothing of markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_runner.batch.report.choice import Group, Section

MAX_CARDS_OF_ONE_FILE = 2000
CARDS_PER_LEAF = 200


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
