"""Renders the pages of a report: their markup, their links to each other, and the policy that lets nothing else in.

Knows nothing of rows beyond their cards, and of files only the names that pages have for each other.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from npu_runner.reports import head
from npu_runner.reports.cards import Card, ShownTurn, without_turns
from npu_runner.reports.choice import Choice, Group, Leaf, Part
from npu_runner.reports.head import About, Bar
from npu_runner.reports.reading import EXPECTED, FAILED, UNEXPECTED
from npu_runner.reports.survey import Survey

_HERE = Path(__file__).parent
_MOST_CODES = 12
_LINKS_AROUND = 2


class ShownPicture(NamedTuple):
    src: str
    width: int
    height: int


class Address(NamedTuple):
    name: str
    anchor: str
    leaf: int
    """From 1."""


class Link(NamedTuple):
    words: str
    href: str | None
    """None: a gap."""
    is_here: bool = False


class LeafView(NamedTuple):
    number: int
    num_leaves: int
    links: list[Link]


@dataclass(frozen=True, kw_only=True)
class Book:
    """What all pages of one report have in common. `version`: the folder of its pages beside the index; None: it is
    one page."""

    output: str
    num_rows: int
    has_input: bool
    found: Survey
    choice: Choice
    leaves: Sequence[Leaf]
    about: About | None
    version: str | None
    addresses: Mapping[int, Address]
    """Of rows that other rows link to, by their number among the vectors."""

    def href(self, leaf: int, *, seen_from: int) -> str:
        """Of a page, from another one; empty on itself."""
        if leaf == seen_from:
            return ""
        if leaf == 1:
            return "../index.html"
        return f"{self.version}/{leaf}.html" if seen_from == 1 else f"{leaf}.html"

    def write(self, number: int, cards: Mapping[int, Card], pictures: Mapping[str, ShownPicture],
              file: BinaryIO, *, ids: Sequence[Sequence[Address]] = ()) -> None:
        """Page `number`, with the cards of its places. `ids`: of the rows on all pages, for the first one."""
        leaf = self.leaves[number - 1]
        addresses = {key: {"name": there.name, "href": f"{self.href(there.leaf, seen_from=number)}#{there.anchor}"}
                     for key, there in self.addresses.items()}
        page = _environment().get_template("page.html.jinja").stream(
            output=self.output, version=self.version or "", is_folder=self.version is not None, policy=_policy(),
            style=_asset("page.css"), script=_asset("page.js"), num_rows=self.num_rows, num_shown=self.choice.num_rows,
            no_input=not self.has_input, leaf=LeafView(number, len(self.leaves), self._links(number)),
            filters=head.filters(self.found, self.choice.sections), contents=self._chapters(number),
            common=_common(self.choice, cards) if number == 1 else [], pictures=pictures, addresses=addresses,
            parts=[self._part(part, cards) for part in leaf], ids=_ids(ids), **(self._head() if number == 1 else {}))
        # "replace": it shows rows that were refused for half a surrogate pair, which no file can hold.
        page.enable_buffering(64)
        page.dump(file, encoding="utf-8", errors="replace")

    def _head(self) -> dict[str, Any]:
        found = self.found
        has_expected = bool(found.outcomes[EXPECTED] + found.outcomes[UNEXPECTED])
        return {
            "facts": [] if self.about is None else self.about.facts(),
            "figures": head.figures(self.num_rows, found, self.about),
            "codes": self._codes(), "fields": head.field_views(found.fields), "num_objects": found.fields.num_objects,
            "num_more_fields": found.fields.num_more_fields,
            "vectors": head.of_vectors(found.vectors), "kinds": _kinds(found), "has_expected": has_expected}

    def _codes(self) -> list[dict[str, Any]]:
        there = [(kind.code, count) for kind, count in self.found.kinds.most_common() if kind.outcome == FAILED]
        hrefs = {section["code"]: section["href"] for section in self._contents(1)}
        num_rows = max(self.found.num_seen, 1)  # a bar is the share of all rows: one failure of many is a short one
        shown = [{"bar": Bar(code, count, 100 * count / num_rows), "href": hrefs.get(code)} for code, count in there]
        others = sum(count for _, count in there[_MOST_CODES:])
        more = [{"bar": Bar(f"{len(there) - _MOST_CODES} more", others, 100 * others / num_rows), "href": None}]
        return [*shown[:_MOST_CODES], *(more if others else [])]

    def _contents(self, seen_from: int) -> list[dict[str, Any]]:
        """Where each section begins."""
        return [
            {"title": part.section.kind.code or head.TITLES[part.section.kind.outcome], "code": part.section.kind.code,
             "num": part.section.num_rows,
             "href": f"{self.href(number, seen_from=seen_from)}#section-{part.number}"}
            for number, leaf in enumerate(self.leaves, 1) for part in leaf if not part.is_continued]

    def _chapters(self, seen_from: int) -> list[dict[str, Any]]:
        """The same with one entry for all failed rows."""
        contents = self._contents(seen_from)
        failed = [section for section in contents if section["code"]]
        num_failed = self.found.outcomes[FAILED]
        first = [{**failed[0], "title": "Failed", "num": num_failed}] if failed else []
        return first + [section for section in contents if not section["code"]]

    def _part(self, part: Part, cards: Mapping[int, Card]) -> dict[str, Any]:
        section = part.section
        counted = f"{section.num_rows:,} row{'s' * (section.num_rows != 1)}"
        if part.num_shown < section.num_rows:
            counted += f", {part.num_shown:,} shown"
        message = cards[section.groups[0].places[0]].message if section.has_one_message else None
        return {
            "number": part.number, "outcome": section.kind.outcome, "code": section.kind.code, "message": message,
            "title": head.TITLES.get(section.kind.outcome, ""),
            "counted": f"{counted}, continued" if part.is_continued else counted,
            "groups": [_group(group, cards, self.choice.common_turns) for group in section.groups]}

    def _links(self, here: int) -> list[Link]:
        """The page before and the one behind, the first and the last, and those around."""
        count = len(self.leaves)
        near = range(here - _LINKS_AROUND, here + _LINKS_AROUND + 1)
        numbers = sorted({1, count, *near} & set(range(1, count + 1)))
        links = [Link("previous", self.href(here - 1, seen_from=here))] if here > 1 else []
        for before, number in zip([0, *numbers], numbers, strict=False):
            if number > before + 1:
                links.append(Link("", None))
            links.append(Link(str(number), self.href(number, seen_from=here) or "#rows", number == here))
        return links + ([Link("next", self.href(here + 1, seen_from=here))] if here < count else [])


def _group(group: Group, cards: Mapping[int, Card], common: frozenset[int]) -> dict[str, Any]:
    here = [cards[place] for place in group.places]
    turns = [without_turns(card, common) for card in here]
    if group.has_one_prompt:
        return {"turns": turns[0], "cards": [(card, []) for card in here]}
    return {"turns": [], "cards": list(zip(here, turns, strict=True))}


def _common(choice: Choice, cards: Mapping[int, Card]) -> list[ShownTurn]:
    """Turns of every row, as the first one that has any says them."""
    for card in cards.values() if choice.common_turns else ():
        if card.turns:
            return [turn for turn, key in zip(card.turns, card.turn_keys, strict=True) if key in choice.common_turns]
    return []


def _kinds(found: Survey) -> list[tuple[str, str, str, str]]:
    rows = []
    for kind, of in sorted(found.by_metadata.items()):
        known = of[EXPECTED] + of[UNEXPECTED]
        good = f"{of[EXPECTED]:,} of {known:,} ({head.share(of[EXPECTED], known)})" if known else ""
        rows.append((kind, f"{of.total():,}", f"{of[FAILED]:,}", good))
    return rows


def _ids(ids: Sequence[Sequence[Address]]) -> Markup | None:
    """[name, anchor] of each row of each page; the anchor is left out where it follows from the name."""
    if not ids:
        return None
    table = [[[there.name] if there.anchor == f"row-{there.name}" else [there.name, there.anchor] for there in leaf]
             for leaf in ids]
    text = json.dumps(table, separators=(",", ":"))  # ASCII, so that nothing in a name ends a line or a script
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def data_url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode("ascii")


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                       lstrip_blocks=True)


@cache
def _asset(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))


@cache
def _policy() -> str:
    """Our style and our script by their hashes, pictures of the page or of its folder, and nothing else."""
    sources = {kind: base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()
               for kind, name in (("style", "page.css"), ("script", "page.js"))}
    return ("default-src 'none'; img-src data: file: 'self'; "
            f"style-src 'sha256-{sources['style']}'; script-src 'sha256-{sources['script']}'; "
            "base-uri 'none'; form-action 'none'")

