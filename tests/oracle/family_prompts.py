"""The prompts that a family is compared over."""

from __future__ import annotations

from typing import Any

from npu_runner import LLM
from tests.families import sees_images
from tests.oracle.image_prompts import FEW_LAYOUTS, make_prompts

TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g " * 20, "colour " * 90]


def prompts_of(llm: LLM, model_type: str, *, of_variant: bool = False) -> tuple[list[Any], list[list[Any]]]:
    """Prompts, and the images of each. A variant differs in its network alone, and has fewer."""
    if sees_images(model_type):
        return make_prompts(llm, ["t", "0t1t2t3", "t44t4"] if of_variant else FEW_LAYOUTS)
    texts = TEXTS[1::2] if of_variant else TEXTS
    return [llm.engine.processor.from_text(text) for text in texts], [[] for _ in texts]
