"""Fresh images with questions and known answers, one per seed: for training, evaluation, the demo, tests and benches.

Imports no torch. Which seeds belong to whom is decided here, so that nothing is measured on what it was trained on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from .questions import SYSTEM_PROMPTS, group_questions, json_question, questions
from .scenes import COLOURS, SHAPES, Scene, draw_scene

DEMO_SEEDS = range(0, 1_000_000)
"""For the demo and the benches."""
EVAL_SEEDS = range(1_000_000, 2_000_000)
"""For the accuracy that is reported."""
VALIDATION_SEEDS = range(2_000_000, 3_000_000)
"""For the accuracy that training watches."""
TEST_SEEDS = range(3_000_000, 4_000_000)
"""For the tests."""
TRAIN_SEEDS = range(1_000_000_000, 2_000_000_000)
"""For training, and for nothing else."""

_PART_WITH_SEVERAL_IMAGES = 0.3


@dataclass(frozen=True)
class Example:
    """One question about one to four images. `question_first`: the text stands before the images; `schema`: what
    an answer in JSON has to fit."""

    images: tuple[Image.Image, ...]
    question: str
    answer: str
    kind: str
    question_first: bool = False
    system: str | None = None
    schema: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Messages for transformers, with PIL images in them."""
        return self.messages([{"type": "image", "image": image} for image in self.images])

    def messages(self, images: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """OpenAI-style messages with these parts for the images."""
        text: list[dict[str, Any]] = [{"type": "text", "text": self.question}]
        user = {"role": "user", "content": text + images if self.question_first else images + text}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]


def draw_example(seed: int) -> Example:
    """The image or images, question and answer of this seed; kinds of question come up evenly within each group."""
    rng = random.Random(seed)
    if rng.random() < _PART_WITH_SEVERAL_IMAGES:
        scenes: Sequence[Scene] = draw_group(rng)
        choices = group_questions(scenes, rng)
    else:
        scenes = [draw_scene(rng)]
        choices = questions(scenes[0], rng)
    question = rng.choice(choices)
    return Example(tuple(scene.image for scene in scenes), question.text, question.answer, question.kind,
                   question_first=rng.random() < 0.3,
                   system=rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None)


def draw_json_example(seed: int) -> Example:
    """The image of this seed with a question that is answered by a JSON object."""
    rng = random.Random(seed)
    scene = draw_scene(rng)
    question = json_question(scene, rng)
    return Example((scene.image,), question.text, question.answer, question.kind, schema=question.schema)


def draw_group(rng: random.Random) -> list[Scene]:
    """Two to four scenes. Two are alike half of the time, and otherwise often differ in a single colour or shape."""
    count = rng.choice((2, 2, 2, 2, 2, 2, 3, 4))
    if count > 2:
        return [draw_scene(rng, max_things=3) for _ in range(count)]
    first = draw_scene(rng, max_things=4)
    kind = rng.random()
    if kind < 0.45:
        return [first, draw_scene(rng, items=first.items)]
    if kind < 0.75:
        items = first.items
        index = rng.randrange(len(items))
        colour, shape = items[index]
        if rng.random() < 0.5:
            colour = rng.choice([other for other in COLOURS if other != colour])
        else:
            shape = rng.choice([other for other in SHAPES if other != shape])
        items[index] = (colour, shape)
        return [first, draw_scene(rng, items=items)]
    return [first, draw_scene(rng, max_things=4)]
