"""The work of bench.device: the same prompts, lengths and images for every engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `real` is what is reported, `tiny` shows that the script works.

    `host` has next to no model, and many sequences: what a step costs the host.
    """

    text_model: str
    num_texts: int
    least_tokens: int
    most_tokens: int
    decode_model: str
    decode_batches: tuple[int, ...]
    context: int
    decode_steps: int
    vision_model: str
    num_pictures: int
    image: tuple[int, int]
    """Width and height in pixels."""
    question_tokens: int
    answer_tokens: int
    moe_model: str
    hybrid_model: str
    bandwidth_bytes: int
    """Read to measure the bandwidth."""
    prompts: tuple[tuple[int, int, int], ...]
    """(prompts, tokens of each, tokens of an answer)."""

    def with_model(self, name: str) -> Sizes:
        """The same work for another model; "moe" and "hybrid" name the models of these families."""
        name = {"moe": self.moe_model, "hybrid": self.hybrid_model}.get(name, name)
        return replace(self, text_model=name, decode_model=name, vision_model=name)


SIZES = {
    "real": Sizes("qwen3-0.6b", 256, 100, 1024, "qwen3-8b", (1, 8, 64), 512, 64, "qwen3-vl-4b", 256, (896, 672), 32,
                  128, "qwen3.6-35b-a3b", "qwen3.5-9b", 4 << 30,
                  ((1, 64, 1), (1, 512, 1), (1, 1024, 1), (16, 16384, 129), (256, 4000, 8))),
    "host": Sizes("tiny", 256, 30, 60, "tiny", (1, 64, 256, 1024), 64, 64, "tiny-vl", 64, (96, 64), 8, 6, "tiny-moe",
                  "tiny-hybrid", 64 << 20, ((1, 64, 1), (4, 700, 8))),
    "tiny": Sizes("tiny", 16, 5, 40, "tiny", (1, 3), 24, 8, "tiny-vl", 6, (96, 64), 8, 6, "tiny-moe",
                  "tiny-hybrid", 64 << 20, ((1, 64, 1), (4, 700, 8))),
}
NUM_TOKEN_IDS = 10000
# Each is one token of shapes-vl's tokenizer behind a space, as "Describe" is at the start.
_WORDS = ("the", "circle", "and", "many", "red", "square", "are", "there", "in", "picture", "colour", "is")


def text_requests(sizes: Sizes, vocab_size: int, repeat: int = 0) -> list[tuple[list[int], int]]:
    """(prompt, number of output tokens): lengths and ids uniform, seed 0, as nano-vllm's benchmark draws them.

    Every repeat has other ids, so that nothing comes out of a prefix cache.
    """
    random = Random(0)
    num_ids = min(NUM_TOKEN_IDS, vocab_size - 1) + 1
    prompts = [[(random.randrange(num_ids) + repeat) % num_ids
                for _ in range(random.randint(sizes.least_tokens, sizes.most_tokens))] for _ in range(sizes.num_texts)]
    return [(prompt, random.randint(sizes.least_tokens, sizes.most_tokens)) for prompt in prompts]


def decode_prompts(batch_size: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Distinct prompts of one length."""
    random = Random(batch_size)
    last_id = min(NUM_TOKEN_IDS, vocab_size - 1)
    return [[random.randint(0, last_id) for _ in range(num_tokens)] for _ in range(batch_size)]


def longest_side(sizes: Sizes, *, is_mixed: bool) -> int:
    """The largest side of an image in pixels."""
    longest = max(sizes.image)
    return longest * 4 // 3 if is_mixed else longest


def write_images(folder: Path, sizes: Sizes, *, is_mixed: bool = False) -> Path:
    """Distinct JPEG files, and the JSONL file that asks about each of them; returns the latter.

    Mixed ones have sides of two thirds to four thirds of `sizes.image`: nearly each has a size of its own.
    """
    from PIL import Image

    requests = folder / "requests.jsonl"
    with requests.open("w") as file:
        for index in range(sizes.num_pictures):
            # Smooth shapes with some noise: noise alone would make files of a megabyte.
            draw = np.random.default_rng(index)
            width, height = (int(draw.integers(side * 2 // 3, side * 4 // 3)) if is_mixed else side
                             for side in sizes.image)
            coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height))
            noise = draw.integers(-8, 9, (height, width, 3))
            pixels = np.clip(np.asarray(coarse, dtype=np.int16) + noise, 0, 255).astype(np.uint8)
            path = folder / f"{index}.jpg"
            Image.fromarray(pixels).save(path, quality=90)
            question = " ".join(["Describe", *draw.choice(_WORDS, sizes.question_tokens - 1)])
            content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": str(path)}},
                                             {"type": "text", "text": question}]
            body = {"model": sizes.vision_model, "messages": [{"role": "user", "content": content}], "temperature": 0,
                    "max_tokens": sizes.answer_tokens, "min_tokens": sizes.answer_tokens, "ignore_eos": True}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    return requests
