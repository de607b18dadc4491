"""Rows with images for the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.shapes.drawing import TEST_SEEDS, Example, draw_example
from tests.batch.scripted import row

EXAMPLES = [draw_example(seed) for seed in TEST_SEEDS[100:106]]
SMALL = ["--platform", "cpu", "--max-model-len", "1024", "--kv-cache-bytes", "64M", "--progress", "off"]


def rows_of(examples: list[Example], folder: Path) -> Iterator[dict[str, Any]]:
    for number, example in enumerate(examples):
        messages = []
        for message in example.conversation():
            parts = message["content"]
            if not isinstance(parts, str):
                parts = [saved(part, folder / f"{number}-{index}.png") for index, part in enumerate(parts)]
            messages.append({**message, "content": parts})
        metadata = {"expected": example.answer, "kind": example.kind}
        yield row(f"good-{number}", messages=messages, max_tokens=96, metadata=metadata)


def saved(part: dict[str, Any], path: Path) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    part["image"].save(path)
    return {"type": "image_url", "image_url": {"url": path.name}}
