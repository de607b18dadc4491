"""Prompts of several lengths, and caches that hold few of them."""

from __future__ import annotations

from typing import Any

from npu_runner import LLM

TEXTS = [f"{word} {'which of the pictures ' * count}" for count, word in enumerate(["a", "b", "c", "d", "e", "f", "g"])]


def text_prompts(llm: LLM) -> list[Any]:
    return [llm.engine.processor.from_text(text) for text in TEXTS]


NUM_BLOCKS = {"qwen3": 24, "qwen3_moe": 24, "qwen3_vl": 40, "qwen2_vl": 41, "qwen2_5_vl": 41, "paddleocr_vl": 41}
