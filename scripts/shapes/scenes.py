"""Draws images of simple coloured shapes with Pillow. Knows nothing of questions, tokens or tensors.

Every image follows from the `random.Random` it is given, with integer arithmetic wherever pixels are made,
so a seed gives the same image on every machine (up to the last bit of sine and cosine).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 38, 38), "orange": (246, 134, 26), "yellow": (250, 218, 44), "green": (46, 156, 66),
    "cyan": (64, 204, 216), "blue": (42, 82, 204), "purple": (124, 52, 168), "pink": (246, 136, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

MIN_SIDE, MAX_SIDE, MAX_ASPECT, MAX_THINGS = 64, 320, 4.0, 5
SMALLEST_THING = 14  # pixels across, in the drawing
SUPERSAMPLING = 4
# No centre comes this near a line that divides the image into thirds: "top left" is never a matter of taste.
THIRDS_MARGIN = 0.04
# Centres differ at least this much in x, so "from left to right" has one answer.
ORDER_GAP = 0.05

Item = tuple[str, str]
"""A colour and a shape."""


@dataclass(frozen=True)
class Thing:
    """One drawn shape. x, y: centre, in pixels; diameter: of the circle around it."""

    colour: str
    shape: str
    x: float
    y: float
    diameter: float

    @property
    def item(self) -> Item:
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """An image and what is in it. things: from left to right."""

    image: Image.Image
    things: tuple[Thing, ...]

    @property
    def items(self) -> list[Item]:
        return [thing.item for thing in self.things]


def draw_scene(rng: random.Random, max_things: int = MAX_THINGS, items: Sequence[Item] | None = None) -> Scene:
    """A fresh image of any size, 64 to 320 pixels a side. `items` asks for exactly these colours and shapes."""
    while True:
        width, height = _image_size(rng)
        wanted = list(items) if items is not None else _choose_items(rng, rng.randint(1, max_things))
        rng.shuffle(wanted)
        things = _place(rng, wanted, width, height)
        if things is not None:
            return Scene(_render(rng, things, width, height), tuple(sorted(things, key=lambda thing: thing.x)))


def _image_size(rng: random.Random) -> tuple[int, int]:
    while True:
        width, height = rng.randint(MIN_SIDE, MAX_SIDE), rng.randint(MIN_SIDE, MAX_SIDE)
        if max(width, height) <= MAX_ASPECT * min(width, height):
            return width, height


def _choose_items(rng: random.Random, count: int) -> list[Item]:
    """Colours and shapes repeat more often than chance would have it: otherwise there is little to count."""
    items: list[Item] = []
    for _ in range(count):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        if items and rng.random() < 0.25:
            colour = rng.choice(items)[0]
        if items and rng.random() < 0.25:
            shape = rng.choice(items)[1]
        items.append((colour, shape))
    return items


def _place(rng: random.Random, items: Sequence[Item], width: int, height: int) -> list[Thing] | None:
    """Finds room for every item, or gives up (None) so that the caller tries another size of image."""
    side = min(width, height)
    smallest = max(SMALLEST_THING, 0.15 * side)
    largest = max(smallest, side * (0.5 if len(items) < 3 else 0.4))
    things: list[Thing] = []
    for colour, shape in items:
        for attempt in range(40):
            diameter = rng.uniform(smallest, largest - (largest - smallest) * attempt / 40)
            margin = diameter / 2 + 1
            x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
            if _near_thirds(x / width) or _near_thirds(y / height):
                continue
            if all(_apart(x, y, diameter, other, width) for other in things):
                things.append(Thing(colour, shape, x, y, diameter))
                break
        else:
            return None
    return things


def _near_thirds(fraction: float) -> bool:
    return abs(fraction - 1 / 3) < THIRDS_MARGIN or abs(fraction - 2 / 3) < THIRDS_MARGIN


def _apart(x: float, y: float, diameter: float, other: Thing, width: int) -> bool:
    distance = math.hypot(x - other.x, y - other.y)
    return distance > (diameter + other.diameter) / 2 + 2 and abs(x - other.x) > ORDER_GAP * width


def _render(rng: random.Random, things: Sequence[Thing], width: int, height: int) -> Image.Image:
    image = _background(rng, width, height)
    for thing in things:
        colour = _jitter(rng, COLOURS[thing.colour], 14)
        box = (round(thing.x - thing.diameter / 2), round(thing.y - thing.diameter / 2))
        angle = math.radians(rng.uniform(-14, 14))
        if rng.random() < 0.3:
            shade = rng.choice((0.45, 0.6, 0.75))
            image.paste(tuple(int(shade * channel) for channel in colour), box, _mask(thing, angle, 1.0))
            image.paste(colour, box, _mask(thing, angle, 0.84))
        else:
            image.paste(colour, box, _mask(thing, angle, 1.0))
    return _add_noise(rng, image)


def _jitter(rng: random.Random, colour: tuple[int, int, int], amount: int) -> tuple[int, int, int]:
    red, green, blue = (max(0, min(255, channel + rng.randint(-amount, amount))) for channel in colour)
    return red, green, blue


def _background(rng: random.Random, width: int, height: int) -> Image.Image:
    """Near-grey, so that no background can be taken for a colour: plain, a gradient, stripes or checks."""
    level = rng.choice((rng.randint(18, 70), rng.randint(105, 140), rng.randint(190, 245)))
    first = _jitter(rng, (level, level, level), 8)
    second_level = max(10, min(250, level + rng.randint(-30, 30)))
    second = _jitter(rng, (second_level, second_level, second_level), 6)
    pattern = rng.choice(("plain", "plain", "gradient", "stripes", "checks"))
    image = Image.new("RGB", (width, height), first)
    if pattern == "gradient":
        ramp = Image.linear_gradient("L")
        ramp = ramp.transpose(Image.Transpose.ROTATE_90) if rng.random() < 0.5 else ramp
        image.paste(second, (0, 0), ramp.resize((width, height)))
    elif pattern in ("stripes", "checks"):
        draw, cell = ImageDraw.Draw(image), rng.randint(6, 40)
        for row, top in enumerate(range(0, height, cell)):
            if pattern == "stripes":
                if row % 2:
                    draw.rectangle((0, top, width, top + cell - 1), fill=second)
                continue
            for left in range(cell * (row % 2), width, 2 * cell):
                draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=second)
    return image


def _add_noise(rng: random.Random, image: Image.Image) -> Image.Image:
    """Grain of up to 12 grey levels either way; a third of the images stay clean."""
    amplitude = rng.choice((0, 8, 24))
    if not amplitude:
        return image
    grain = Image.frombytes("L", image.size, rng.randbytes(image.width * image.height))
    grain = grain.point([value * amplitude // 255 for value in range(256)])
    return ImageChops.add(image, Image.merge("RGB", (grain, grain, grain)), 1.0, -amplitude // 2)


def _mask(thing: Thing, angle: float, scale: float) -> Image.Image:
    """The shape's coverage, 0 to 255, in a square as wide as the thing; drawn large and averaged down."""
    pixels = round(thing.diameter) + 1
    size = pixels * SUPERSAMPLING
    mask = Image.new("L", (size, size), 0)
    draw = ImageDraw.Draw(mask)
    centre, radius = size / 2, thing.diameter * SUPERSAMPLING / 2 * scale
    if thing.shape in ("circle", "ring"):
        draw.ellipse((centre - radius, centre - radius, centre + radius, centre + radius), fill=255)
        if thing.shape == "ring":
            hole = thing.diameter * SUPERSAMPLING / 2 * (0.56 + 0.16 * (1 - scale))
            draw.ellipse((centre - hole, centre - hole, centre + hole, centre + hole), fill=0)
    else:
        corners = [_turn(x * radius, y * radius, angle) for x, y in _OUTLINES[thing.shape]]
        draw.polygon([(centre + x, centre + y) for x, y in corners], fill=255)
    return mask.reduce(SUPERSAMPLING)


def _turn(x: float, y: float, angle: float) -> tuple[float, float]:
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


def _spokes(radii: Sequence[float]) -> list[tuple[float, float]]:
    """Corners at equal angles around the centre, the first one straight up."""
    turn = 2 * math.pi / len(radii)
    return [(radius * math.sin(turn * i), -radius * math.cos(turn * i)) for i, radius in enumerate(radii)]


def _cross(arm: float = 0.3, reach: float = 0.95) -> list[tuple[float, float]]:
    quarter = [(-arm, -reach), (arm, -reach), (arm, -arm)]
    return [_turn(x, y, math.pi / 2 * turns) for turns in range(4) for x, y in quarter]


_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)],
    "triangle": _spokes((1.0, 1.0, 1.0)),
    "star": _spokes((1.0, 0.42) * 5),
    "cross": _cross(),
}
