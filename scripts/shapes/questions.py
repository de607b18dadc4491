"""Asks about drawn scenes; every question has exactly one right answer. Knows nothing of pixels, tokens or tensors."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from .scenes import COLOURS, SHAPES, Item, Scene, Thing

NUMBERS = ("zero", "one", "two", "three", "four", "five")
ORDINALS = ("first", "second", "third", "fourth")
# Two centres nearer than this part of the side are neither clearly left/right nor clearly above/below of each other.
CLEARLY = 0.15

_LEFTMOST: dict[str, Any] = {
    "count": {"type": "integer", "minimum": 1, "maximum": 5, "description": "of the objects in the picture"},
    "color": {"enum": list(COLOURS)},
    "shape": {"enum": list(SHAPES)},
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer questions about pictures.",
    "You look at drawings of simple shapes. Answer briefly.",
)


@dataclass(frozen=True)
class Question:
    """kind: the name accuracy is reported under; schema: what an answer in JSON has to fit."""

    kind: str
    text: str
    answer: str
    schema: dict[str, Any] | None = None


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """One question of every kind that this image allows, in a fixed order of kinds."""
    asked = (ask(scene, rng) for ask in _ABOUT_ONE)
    return [question for question in asked if question is not None]


def json_question(scene: Scene, rng: random.Random) -> Question:
    """A question whose answer is a JSON object, written as json.dumps writes it."""
    if rng.random() < 0.3:
        asked = _ask_presence(scene, rng)
        return _in_json(asked.text, {"present": asked.answer == "yes"}, {"present": {"type": "boolean"}})
    return leftmost_question(scene, rng.choice(("What is on the left?", "What is left of all?")))


def leftmost_question(scene: Scene, text: str = "What is on the left?") -> Question:
    """One that fits every scene, with one schema."""
    colour, shape = scene.items[0]
    return _in_json(text, {"count": len(scene.things), "color": colour, "shape": shape}, _LEFTMOST)


def group_questions(scenes: Sequence[Scene], rng: random.Random) -> list[Question]:
    """The same for two to four images shown together."""
    asked = (ask(scenes, rng) for ask in _ABOUT_SEVERAL)
    return [question for question in asked if question is not None]


def text_question(rng: random.Random) -> Question:
    """A question that needs no image."""
    text, answer = rng.choice(_TEXT_ONLY)
    return Question("text", text, answer)


def _in_json(text: str, fields: dict[str, Any], properties: dict[str, Any]) -> Question:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Question("json", f"{text} JSON: {', '.join(fields)}", json.dumps(fields), schema)


def _color(rng: random.Random) -> str:
    return rng.choice(("color", "colour"))


def _a(item: Item) -> str:
    colour, shape = item
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"


def _once(scene: Scene, attribute: str) -> list[str]:
    """The colours, or the shapes, that one thing alone has."""
    values = Counter(getattr(thing, attribute) for thing in scene.things)
    return [value for value, count in values.items() if count == 1]


def _with(scene: Scene, attribute: str, value: str) -> Thing:
    return next(thing for thing in scene.things if getattr(thing, attribute) == value)


def _named_once(scene: Scene) -> list[Thing]:
    """Things that "the red circle" points out without doubt."""
    counts = Counter(scene.items)
    return [thing for thing in scene.things if counts[thing.item] == 1]


def _yes_no(truth: bool) -> str:
    return "yes" if truth else "no"


def _place(thing: Thing, scene: Scene) -> str:
    column = ("left", "", "right")[int(3 * thing.x / scene.image.width)]
    row = ("top", "", "bottom")[int(3 * thing.y / scene.image.height)]
    if not row and not column:
        return "in the center"
    return ("at the " if row else "on the ") + f"{row} {column}".strip()


def _ask_colour(scene: Scene, rng: random.Random) -> Question | None:
    shapes = _once(scene, "shape")
    if not shapes:
        return None
    shape = rng.choice(shapes)
    templates = ("What {c} is the {s}?", "Which {c} does the {s} have?", "Tell me the {c} of the {s}.",
                 "The {s}: what {c}?")
    text = rng.choice(templates).format(c=_color(rng), s=shape)
    return Question("color", text, _with(scene, "shape", shape).colour)


def _ask_shape(scene: Scene, rng: random.Random) -> Question | None:
    colours = _once(scene, "colour")
    if not colours:
        return None
    colour = rng.choice(colours)
    templates = ("What shape is {}?", "What shape is the {} object?", "Which shape has the {c} {}?",
                 "Name the {} shape.")
    text = rng.choice(templates).format(colour, c=_color(rng))
    return Question("shape", text, _with(scene, "colour", colour).shape)


def _ask_count(scene: Scene, rng: random.Random) -> Question:
    counted = rng.choice(("all", "colour", "shape"))
    if counted == "all":
        templates = ("How many objects are there?", "How many shapes do you see?", "Count the objects in the picture.")
        return Question("count", rng.choice(templates), str(len(scene.things)))
    values = [getattr(thing, counted) for thing in scene.things]
    every = list(COLOURS) if counted == "colour" else list(SHAPES)
    value = rng.choice(values if rng.random() < 0.8 else every)
    noun = f"{value} objects" if counted == "colour" else {"cross": "crosses"}.get(value, f"{value}s")
    templates = ("How many {} are there?", "How many {} do you see?", "Count the {}.")
    return Question("count", rng.choice(templates).format(noun), str(values.count(value)))


def _ask_presence(scene: Scene, rng: random.Random) -> Question:
    items = scene.items
    if rng.random() < 0.5:
        item = rng.choice(items)
    else:
        # Half of the absent items are made of parts that are there: a colour and a shape, but not on one thing.
        absent = [(colour, shape) for colour in COLOURS for shape in SHAPES if (colour, shape) not in items]
        colours, shapes = {colour for colour, _ in items}, {shape for _, shape in items}
        tempting = [item for item in absent if (item[0] in colours) != (item[1] in shapes)]
        mixed = [item for item in absent if item[0] in colours and item[1] in shapes]
        item = rng.choice(rng.choice([pool for pool in (mixed, tempting, absent) if pool]))
    templates = ("Is there {}?", "Do you see {}?", "Does the picture show {}?", "Can you find {} here?")
    return Question("presence", rng.choice(templates).format(_a(item)), _yes_no(item in items))


def _ask_position(scene: Scene, rng: random.Random) -> Question | None:
    pairs = [(first, second, axis) for first, second in combinations(_named_once(scene), 2)
             for axis, gap in (("x", scene.image.width), ("y", scene.image.height))
             if abs(getattr(first, axis) - getattr(second, axis)) > CLEARLY * gap]
    if not pairs:
        return None
    first, second, axis = rng.choice(pairs)
    if rng.random() < 0.5:
        first, second = second, first
    before, after = ("left of", "right of") if axis == "x" else ("above", "below")
    truth = before if getattr(first, axis) < getattr(second, axis) else after
    names = [f"the {thing.colour} {thing.shape}" for thing in (first, second)]
    if rng.random() < 0.5:
        claim = rng.choice((before, after))
        templates = ("Is {} {claim} {}?", "Is it true that {} is {claim} {}?")
        return Question("position", rng.choice(templates).format(*names, claim=claim), _yes_no(claim == truth))
    templates = ("Is {} {before} or {after} {}?", "Where is {}: {before} or {after} {}?")
    text = rng.choice(templates).format(*names, before=before, after=after)
    return Question("position", text, truth.removesuffix(" of"))


def _ask_place(scene: Scene, rng: random.Random) -> Question | None:
    things = _named_once(scene)
    if not things:
        return None
    thing = rng.choice(things)
    templates = ("Where is the {}?", "Where in the picture is the {}?", "In which part of the picture is the {}?")
    return Question("place", rng.choice(templates).format(" ".join(thing.item)), _place(thing, scene))


def _ask_list(scene: Scene, rng: random.Random) -> Question:
    templates = ("List all objects from left to right.", "Name every object, from left to right.",
                 "List everything, left to right.")
    return Question("list", rng.choice(templates), ", ".join(" ".join(item) for item in scene.items))


def _ask_describe(scene: Scene, rng: random.Random) -> Question:
    templates = ("Describe the picture.", "Describe this image.", "What does the picture show?", "What do you see?")
    count = len(scene.things)
    parts = [f"{_a(thing.item)} {_place(thing, scene)}" for thing in scene.things]
    listing = parts[0] if count == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    noun = "object" if count == 1 else "objects"
    return Question("describe", rng.choice(templates), f"The picture shows {NUMBERS[count]} {noun}: {listing}.")


def _ask_which(scenes: Sequence[Scene], rng: random.Random) -> Question | None:
    holders: dict[Item, list[int]] = {}
    for index, scene in enumerate(scenes):
        for item in set(scene.items):
            holders.setdefault(item, []).append(index)
    single = sorted((item, indexes[0]) for item, indexes in holders.items() if len(indexes) == 1)
    if not single:
        return None
    item, index = rng.choice(single)
    templates = ("Which picture has {}?", "Which picture shows {}?", "In which image is there {}?")
    return Question("which", rng.choice(templates).format(_a(item)), f"the {ORDINALS[index]}")


def _ask_alike(scenes: Sequence[Scene], rng: random.Random) -> Question | None:
    if len(scenes) != 2:
        return None
    templates = ("Do both pictures show the same objects?", "Are the two pictures alike?",
                 "Do the two images have the same objects in them?")
    return Question("alike", rng.choice(templates), _yes_no(Counter(scenes[0].items) == Counter(scenes[1].items)))


def _ask_more(scenes: Sequence[Scene], rng: random.Random) -> Question | None:
    if len(scenes) != 2:
        return None
    first, second = (len(scene.things) for scene in scenes)
    templates = ("Which picture has more objects?", "Which image shows more shapes?", "Where are more objects?")
    answer = "neither" if first == second else f"the {ORDINALS[int(second > first)]}"
    return Question("more", rng.choice(templates), answer)


def _ask_pick(scenes: Sequence[Scene], rng: random.Random) -> Question | None:
    """A question about one of several images."""
    index = rng.randrange(len(scenes))
    where = f"the {ORDINALS[index]} {rng.choice(('picture', 'image'))}"
    scene = scenes[index]
    shapes = _once(scene, "shape")
    if shapes and rng.random() < 0.5:
        shape = rng.choice(shapes)
        return Question("pick", f"What {_color(rng)} is the {shape} in {where}?", _with(scene, "shape", shape).colour)
    if rng.random() < 0.5:
        return Question("pick", f"How many objects are in {where}?", str(len(scene.things)))
    return Question("pick", f"List the objects of {where} from left to right.", _ask_list(scene, rng).answer)


_ABOUT_ONE: tuple[Callable[[Scene, random.Random], Question | None], ...] = (
    _ask_colour, _ask_shape, _ask_count, _ask_presence, _ask_position, _ask_place, _ask_list, _ask_describe)
_ABOUT_SEVERAL: tuple[Callable[[Sequence[Scene], random.Random], Question | None], ...] = (
    _ask_which, _ask_alike, _ask_more, _ask_pick)
_TEXT_ONLY = (
    ("Hello!", "Hello! Show me a picture and ask about its shapes."),
    ("Hi.", "Hello! Show me a picture and ask about its shapes."),
    ("Who are you?", "I am shapes-vl, a very small model that looks at drawn shapes."),
    ("What can you do?", "I can name, count, compare and describe shapes in pictures."),
    ("Which colors do you know?", f"{', '.join(list(COLOURS)[:-1])} and {list(COLOURS)[-1]}."),
    ("Which shapes do you know?", f"{', '.join(SHAPES[:-1])} and {SHAPES[-1]}."),
    ("Thank you.", "You are welcome."),
    ("How many corners has a triangle?", "3"),
    ("How many corners has a square?", "4"),
    ("Is red a color?", "yes"),
    ("Is a circle a color?", "no"),
    ("Goodbye.", "Goodbye!"),
)
