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

from npu_runner.assets import EMBEDDED, SHAPES_VL
from scripts.shapes import drawing
from scripts.shapes.drawing import TEST_SEEDS, draw_example, draw_json_example
from scripts.shapes.questions import json_question
from scripts.shapes.scenes import draw_scene
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
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True).stdout


def test_a_seed_draws_the_same_in_every_process() -> None:
    assert fingerprint(TEST_SEEDS[0], "1") == fingerprint(TEST_SEEDS[0], "2")
    assert fingerprint(TEST_SEEDS[0], "1") != fingerprint(TEST_SEEDS[40], "1")


def test_drawing_imports_no_torch() -> None:
    program = "import sys, scripts.shapes.drawing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_nobody_shares_seeds() -> None:
    ranges = sorted((drawing.DEMO_SEEDS, drawing.EVAL_SEEDS, drawing.VALIDATION_SEEDS, drawing.TEST_SEEDS,
                     drawing.TRAIN_SEEDS), key=lambda seeds: seeds.start)
    assert all(first.stop <= second.start for first, second in itertools.pairwise(ranges))


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
