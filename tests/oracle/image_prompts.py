"""Prompts with images, described by layouts: t is text, a digit the image of that number."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_runner import LLM
from tests.full_set import is_fast
from tests.oracle.reference import random_image

SIZES = [(70, 45), (200, 33), (31, 190), (128, 128), (250, 251), (8, 8)]
# t: a stretch of text; digits: the image of that number
LAYOUTS = ["t", "0t", "t1", "t2t", "t01t", "3t4", "0t1t2t3", "t44t4", "5t", "012t345"]
FEW_LAYOUTS = LAYOUTS[::3] if is_fast else LAYOUTS
"""Where what is shown does not matter beyond that."""


def conversation(layout: str, images: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    parts: list[dict[str, Any]] = []
    used = []
    for mark in layout:
        if mark == "t":
            parts.append({"type": "text", "text": "which picture shows a circle " * len(parts or "x")})
        else:
            parts.append({"type": "image", "image": images[int(mark)]})
            used.append(images[int(mark)])
    return [{"role": "user", "content": parts}], used


def make_prompts(llm: LLM, layouts: list[str]) -> tuple[list[Any], list[list[Any]]]:
    rng = np.random.default_rng(7)
    images = [random_image(rng, *size) for size in SIZES]
    built = [conversation(layout, images) for layout in layouts]
    return [llm.engine.processor(messages) for messages, _ in built], [used for _, used in built]
