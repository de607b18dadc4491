"""Pages of text with their Markdown, one per seed, for the embedded page reader. Imports no torch.

A page is 384 x 512 pixels: at most ten lines of at most 24 ASCII characters, 24 to 28 pixels high, in one of three
free fonts. Letters and words are random, so that a reader has to look. The fonts are Bitstream Vera Sans and Source
Serif Pro (fonts/, with their licences), and Aileron, which Pillow carries.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 384, 512
MOST_LINES, MOST_CHARACTERS = 10, 24
HEIGHTS = range(24, 29)
"""From ascender to descender, in pixels."""
MARGIN, INDENT = 8, 22
FONTS = ("vera", "serif", "aileron")
PAGE_SEEDS = {"evaluation": range(1_000_000, 2_000_000), "validation": range(2_000_000, 3_000_000),
              "test": range(3_000_000, 4_000_000), "training": range(1_000_000_000, 2_000_000_000)}
"""Each is for its purpose, and for nothing else."""

_FOLDER = Path(__file__).parent / "fonts"
_FILES = {"vera": _FOLDER / "Vera.ttf", "serif": _FOLDER / "SourceSerifPro-Regular.ttf"}
_LETTERS = "eeeeeeeeetttttttaaaaaaooooooiiiiiinnnnnnssssssrrrrrrhhhhhllllddddccccuuummmfffppggwwyybbvvkkxjqz"
_ANY = "".join(map(chr, range(33, 127)))

Kind = Literal["heading", "lines", "list", "table"]
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Block:
    """Rows have one cell each, those of a table several."""

    kind: Kind
    rows: Rows

    def markdown(self) -> str:
        if self.kind == "table":
            first, *others = ["| " + " | ".join(row) + " |" for row in self.rows]
            return "\n".join([first, "| " + " | ".join("---" for _ in self.rows[0]) + " |", *others])
        opening = {"heading": "# ", "list": "- ", "lines": ""}[self.kind]
        return "\n".join(opening + row[0] for row in self.rows)


@dataclass(frozen=True)
class Glyph:
    """A character that stands on a page, and its middle in pixels."""

    character: str
    x: float
    y: float


@dataclass(frozen=True)
class Page:
    image: Image.Image
    markdown: str
    glyphs: tuple[Glyph, ...]


def draw_page(seed: int, most_lines: int = MOST_LINES) -> Page:
    """The page of this seed."""
    rng = random.Random(seed)
    font = rng.choice(FONTS)
    return set_page(random_blocks(rng, font, rng.randint(max(1, most_lines // 4), most_lines)), font, rng)


def set_page(blocks: Sequence[Block], font_name: str, rng: random.Random) -> Page:
    """A page with these blocks. Raises ValueError where they do not fit."""
    font = _font(font_name, rng.choice(HEIGHTS))
    count = sum(len(block.rows) for block in blocks)
    if not 1 <= count <= MOST_LINES:
        raise ValueError(f"a page has {count} lines; the limit is {MOST_LINES}")
    image = Image.new("L", (WIDTH, HEIGHT), rng.randint(225, 255))
    draw, ink = ImageDraw.Draw(image), rng.randint(0, 70)
    gap = rng.randint(8, 16)
    room = HEIGHT - 2 * MARGIN - gap * (len(blocks) - 1)
    pitch = min(room // count, rng.randint(34, 46))
    left = MARGIN + rng.randint(0, 8)
    y = MARGIN + rng.randint(0, room - pitch * count)
    glyphs: list[Glyph] = []
    for block in blocks:
        x = left + (INDENT if block.kind == "list" else 0)
        if block.kind == "table":
            _draw_table(draw, block.rows, font, (x, y, pitch), ink, glyphs)
        for row, (text,) in enumerate(block.rows if block.kind != "table" else ()):
            top = y + row * pitch + (pitch - sum(font.getmetrics())) // 2
            end = _draw_text(draw, text, font, (x, top), ink, glyphs)
            if end > WIDTH:
                raise ValueError(f"the line {text!r} is wider than {WIDTH} pixels; cut it with fit()")
            if block.kind == "heading":
                under = top + sum(font.getmetrics()) + 2
                draw.rectangle((x, under, end, under + 1), fill=ink)
            elif block.kind == "list":
                middle = top + sum(font.getmetrics()) // 2 + 1
                draw.ellipse((x - 15, middle - 4, x - 7, middle + 4), fill=ink)
        y += pitch * len(block.rows) + gap
    return Page(image, "\n\n".join(block.markdown() for block in blocks), tuple(glyphs))


def fit(text: str, font_name: str, *, indented: bool = False) -> str:
    """The beginning of a text that fits a line at every height."""
    font, text = _font(font_name, HEIGHTS[-1]), text[:MOST_CHARACTERS].strip()
    while font.getlength(text) > WIDTH - 2 * MARGIN - 8 - INDENT * indented:
        text = text[:-1].strip()
    return text


def random_blocks(rng: random.Random, font: str, count: int) -> list[Block]:
    """Blocks of `count` lines together: perhaps a heading, then lines and lists in turn, and at most one table."""
    blocks: list[Block] = []
    tables = False
    if rng.random() < 0.5:
        blocks.append(Block("heading", ((random_line(rng, font),),)))
        count -= 1
    while count > 0:
        last = blocks[-1].kind if blocks else None
        kinds: list[Kind] = ["lines", "lines", "lines", "list", "table"]
        kind = rng.choice([kind for kind in kinds if kind not in (last, tables and "table")])
        tables = tables or kind == "table"
        num_rows = min(count, rng.randint(2, 4) if kind == "table" else rng.randint(1, rng.choice((3, 10))))
        columns = rng.randint(2, 3)
        blocks.append(Block(kind, tuple(
            tuple(str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(columns)) if kind == "table"
            else (random_line(rng, font, indented=kind == "list"),) for _ in range(num_rows))))
        count -= num_rows
    return blocks


def random_line(rng: random.Random, font: str, *, indented: bool = False) -> str:
    length = rng.randint(*rng.choice(((1, 12), (12, MOST_CHARACTERS), (20, MOST_CHARACTERS))))
    text = ""
    while len(text) < length:
        text += _word(rng) + " "
    return fit(text[:length], font, indented=indented)


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return "".join(rng.choices(_ANY, k=rng.randint(1, 8)))
    if kind < 0.42:
        return str(rng.randrange(10 ** rng.randint(1, 6))) + rng.choice(("", "", ".", ",", "%"))
    word = "".join(rng.choices(_LETTERS, k=rng.randint(1, 9)))
    word = rng.choice((word, word, word, word.capitalize(), word.upper()))
    if kind < 0.52:
        return rng.choice(("-", "--", "$", "${", "/", "~/", "#", "<", "[", "@")) + word + rng.choice(("", "}", "="))
    if kind < 0.6:
        return word + rng.choice("-_/.:=+") + "".join(rng.choices(_LETTERS, k=rng.randint(1, 4)))
    opening, closing = rng.choice((("", ""), ("", ""), ("", "."), ("", ","), ("(", ")"), ('"', '"'), ("'", "'"),
                                   ("`", "'"), ("", ":"), ("", ";"), ("", "'s"), ("", "?")))
    return opening + word + closing


@functools.lru_cache(None)
def _font(name: str, height: int) -> ImageFont.FreeTypeFont:
    """The largest whole size that is at most so high."""
    if name not in FONTS:
        raise ValueError(f"font {name!r}: is none of {', '.join(FONTS)}")
    for size in range(height, 0, -1):
        font = (ImageFont.truetype(_FILES[name], size, layout_engine=ImageFont.Layout.BASIC) if name in _FILES
                else ImageFont.load_default(size))
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise RuntimeError("Pillow was built without FreeType; install its wheel")
        if sum(font.getmetrics()) <= height:
            return font
    raise AssertionError(height)


@functools.lru_cache(None)
def _advance(font: ImageFont.FreeTypeFont, pair: tuple[str, str]) -> float:
    """How far the second character goes on behind the first one, kerning included. To measure each beginning of a line
    takes half of the time of a page."""
    return font.getlength("".join(pair)) - font.getlength(pair[0])


def _draw_text(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont, place: tuple[float, float],
               ink: int, glyphs: list[Glyph]) -> float:
    """Returns where the text ends."""
    draw.text(place, text, fill=ink, font=font)
    x, y = place[0], place[1] + sum(font.getmetrics()) / 2
    ends = [0.0, *itertools.accumulate(_advance(font, pair) for pair in zip(" " + text, text, strict=False))]
    glyphs += [Glyph(character, x + (first + last) / 2, y)
               for character, (first, last) in zip(text, itertools.pairwise(ends), strict=True) if character != " "]
    return x + ends[-1]


def _draw_table(draw: ImageDraw.ImageDraw, rows: Rows, font: ImageFont.FreeTypeFont, place: tuple[int, int, int],
                ink: int, glyphs: list[Glyph]) -> None:
    left, top, pitch = place
    width = round(max(font.getlength(cell) for row in rows for cell in row)) + 16
    right, bottom = left + width * len(rows[0]), top + pitch * len(rows)
    if right >= WIDTH:
        raise ValueError(f"a table is {right - left} pixels wide; a page has {WIDTH - left} from its left edge")
    for x in range(left, right + 1, width):
        draw.line((x, top, x, bottom), fill=ink)
    for y in range(top, bottom + 1, pitch):
        draw.line((left, y, right, y), fill=ink)
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            corner = (left + column * width + 8, top + row * pitch + (pitch - sum(font.getmetrics())) // 2)
            _draw_text(draw, cell, font, corner, ink, glyphs)
