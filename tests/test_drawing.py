"""The drawings, their questions and the embedded checkpoint's folder hold what they promise."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
from hypothesis import example as always_try
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from npu_runner.assets import EMBEDDED, SHAPES_VL
from scripts.shapes import drawing
from scripts.shapes.drawing import (
    COLOURS,
    SHAPES,
    TEST_SEEDS,
    draw_example,
    draw_group,
    draw_json_example,
    draw_scene,
    json_question,
    questions,
)
from tests.full_set import examples

ROOT = Path(__file__).parents[1]
SCENES = [draw_scene(random.Random(seed)) for seed in TEST_SEEDS[:150]]


FINGERPRINT = """
import hashlib, sys
from scripts.shapes.drawing import draw_example

digest = hashlib.sha256()
for seed in range(int(sys.argv[1]), int(sys.argv[1]) + 40):
    example = draw_example(seed)
    digest.update(repr((example.question, example.answer, example.kind, example.system)).encode())
    for image in example.images:
        digest.update(repr(image.size).encode() + image.tobytes())
print(digest.hexdigest())
"""


def fingerprint(first_seed: int, hash_seed: str) -> str:
    """Of forty examples, drawn in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", FINGERPRINT, str(first_seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_seed_draws_the_same_in_every_process() -> None:
    assert fingerprint(TEST_SEEDS[0], "1") == fingerprint(TEST_SEEDS[0], "2")
    assert fingerprint(TEST_SEEDS[0], "1") != fingerprint(TEST_SEEDS[40], "1")


def test_drawing_imports_no_torch() -> None:
    program = "import sys, scripts.shapes.drawing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_nobody_shares_seeds() -> None:
    ranges = sorted(
        [
            drawing.DEMO_SEEDS,
            drawing.EVAL_SEEDS,
            drawing.VALIDATION_SEEDS,
            drawing.TEST_SEEDS,
            drawing.TRAIN_SEEDS,
        ],
        key=lambda seeds: seeds.start,
    )
    assert all(first.stop <= second.start for first, second in itertools.pairwise(ranges))


def test_images_vary_as_promised() -> None:
    sides = [side for scene in SCENES for side in scene.image.size]
    assert 64 <= min(sides) < 100
    assert 280 < max(sides) <= 320
    assert sum(side % 32 == 0 for side in sides) < len(sides) / 4
    assert {len(scene.things) for scene in SCENES} == {1, 2, 3, 4, 5}
    assert {thing.colour for scene in SCENES for thing in scene.things} == set(COLOURS)
    assert {thing.shape for scene in SCENES for thing in scene.things} == set(SHAPES)
    assert len(COLOURS) >= 8
    assert len(SHAPES) >= 5


def nearest_colour(image: Image.Image, x: float, y: float) -> str:
    box = (round(x) - 1, round(y) - 1, round(x) + 2, round(y) + 2)
    seen = image.crop(box).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], seen, strict=True)))


def test_things_have_their_colour_where_they_are_said_to_be() -> None:
    for scene in SCENES:
        for thing in scene.things:
            if thing.shape == "ring" and thing.diameter < 24:
                continue  # its band is narrower than the spot looked at
            reach = 0.36 * thing.diameter if thing.shape == "ring" else 0.0  # a ring's middle is background
            assert nearest_colour(scene.image, thing.x - reach, thing.y) == thing.colour


def test_things_keep_apart() -> None:
    for scene in SCENES:
        for index, thing in enumerate(scene.things):
            for other in scene.things[index + 1 :]:
                distance = ((thing.x - other.x) ** 2 + (thing.y - other.y) ** 2) ** 0.5
                assert distance > (thing.diameter + other.diameter) / 2
                assert thing.x < other.x


def asked(kind: str) -> list[tuple[list[str], str, str]]:
    """(things as the list question names them, question, answer) for every question of a kind."""
    found = []
    for seed, scene in enumerate(SCENES):
        by_kind = {question.kind: question for question in questions(scene, random.Random(seed))}
        if kind in by_kind:
            found.append((by_kind["list"].answer.split(", "), by_kind[kind].text, by_kind[kind].answer))
    assert len(found) > 40
    return found


def test_presence_and_count_agree_with_the_list() -> None:
    for things, text, answer in asked("presence"):
        (item,) = re.findall(r"\ban? (\w+ \w+)(?: here)?\?$", text)
        assert answer == ("yes" if item in things else "no")
    for things, text, answer in asked("count"):
        words = [word for thing in things for word in thing.split()]
        named = [word for word in (*COLOURS, *SHAPES) if re.search(rf"\b{word}(s|es)?\b", text)]
        assert answer == str(words.count(named[0]) if named else len(things))


def test_color_and_shape_questions_point_at_one_thing() -> None:
    for things, text, answer in asked("color"):
        (shape,) = (shape for shape in SHAPES if shape in text)
        assert [thing.split()[0] for thing in things if thing.endswith(shape)] == [answer]
    for things, text, answer in asked("shape"):
        (colour,) = (colour for colour in COLOURS if re.search(rf"\b{colour}\b", text))
        assert [thing.split()[1] for thing in things if thing.startswith(colour)] == [answer]


def test_answers_in_json_fit_their_schema_and_say_what_is_in_the_image() -> None:
    for index, scene in enumerate(SCENES):
        asked = json_question(scene, random.Random(index))
        found = json.loads(asked.answer)
        jsonschema.validate(found, asked.schema)
        if "present" in found:
            (named,) = re.findall(r"\ban? (\w+) (\w+)(?: here)?\?", asked.text)
            assert found == {"present": named in scene.items}
        else:
            leftmost = min(scene.things, key=lambda thing: thing.x)
            assert found == {"count": len(scene.things), "color": leftmost.colour, "shape": leftmost.shape}
    kinds = Counter("present" in json.loads(draw_json_example(seed).answer) for seed in TEST_SEEDS[:100])
    assert min(kinds.values()) > 15


def test_a_description_names_every_thing_in_order() -> None:
    for things, _, answer in asked("describe"):
        assert re.findall(r"\ban? (\w+ \w+) (?:at|on|in) the ", answer) == things


def test_positions_follow_the_pixels() -> None:
    checked = 0
    for seed, scene in enumerate(SCENES):
        where = {" ".join(thing.item): (thing.x, thing.y) for thing in scene.things}
        for question in questions(scene, random.Random(seed)):
            if question.kind != "position":
                continue
            first, second = (where[name] for name in re.findall(r"the (\w+ \w+)", question.text)[:2])
            truths = {"left": first[0] < second[0], "right": first[0] > second[0]}
            truths |= {"above": first[1] < second[1], "below": first[1] > second[1]}
            if question.answer in truths:
                assert truths[question.answer]
            else:
                (claim,) = re.findall(r"is (?:the \w+ \w+ is )?.*?(left|right|above|below)", question.text.lower())
                assert question.answer == ("yes" if truths[claim] else "no")
            checked += 1
    assert checked > 40


def test_groups_are_alike_about_half_of_the_time() -> None:
    pairs = [group for group in (draw_group(random.Random(seed)) for seed in TEST_SEEDS[:120]) if len(group) == 2]
    alike = sum(sorted(first.items) == sorted(second.items) for first, second in pairs)
    assert 0.3 < alike / len(pairs) < 0.65


def test_examples_cover_every_kind_and_put_each_image_in_the_conversation() -> None:
    examples = [draw_example(seed) for seed in TEST_SEEDS[:200]]
    assert len(Counter(example.kind for example in examples)) == 12
    assert {len(example.images) for example in examples} == {1, 2, 3, 4}
    for example in examples:
        content = example.conversation()[-1]["content"]
        assert [part["image"] for part in content if part["type"] == "image"] == list(example.images)
        assert (content[0]["type"] == "text") == example.question_first
        assert (example.conversation()[0]["role"] == "system") == (example.system is not None)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHAPES_VL)


@always_try(text="".join(map(chr, range(0x250))) + "漢字 🎈")
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    normal = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == normal


def test_the_chat_template_writes_qwens_format(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "image"}, {"type": "image_url"}, {"type": "text", "text": "Alike?"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Sure?"},
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        f"<|im_start|>user\n{image}{image}Alike?<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_embedded_checkpoints_stay_below_eleven_megabytes() -> None:
    """shapes-hybrid has a head that drafts, too."""
    for folder in EMBEDDED.values():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 11_000_000
