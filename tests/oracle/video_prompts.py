"""Prompts with videos, described by layouts: t is text, p an image, a digit the video of that number."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_runner import LLM
from tests.oracle.reference import random_image


def conversation(layout: str, videos: list[bytes]) -> tuple[list[dict[str, Any]], list[Any]]:
    image = random_image(np.random.default_rng(7), 70, 45)
    parts: list[dict[str, Any]] = []
    seen: list[Any] = []
    for mark in layout:
        if mark == "t":
            parts.append({"type": "text", "text": "which shows a circle " * len(parts or "x")})
        elif mark == "p":
            parts.append({"type": "image", "image": image})
        else:
            parts.append({"type": "video", "video": videos[int(mark)]})
        seen += [image] if mark == "p" else [videos[int(mark)]] if mark.isdigit() else []
    return [{"role": "user", "content": parts}], seen


def make_prompts(llm: LLM, layouts: list[str], videos: list[bytes]) -> tuple[list[Any], list[list[Any]]]:
    built = [conversation(layout + "t" * ("t" not in layout), videos) for layout in layouts]
    return [llm.engine.processor(messages) for messages, _ in built], [seen for _, seen in built]
