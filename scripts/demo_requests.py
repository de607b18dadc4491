"""Draws fresh images and writes a batch job's input for them: what scripts/demo.sh runs on. Each fourth row asks for
a JSON object and says by a schema which one.

usage: demo_requests.py FOLDER [--num-rows N] [--first-seed S]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.shapes.drawing import DEMO_SEEDS, Example, draw_example, draw_json_example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets requests.jsonl and pictures/")
    parser.add_argument("--num-rows", type=int, default=64)
    parser.add_argument("--first-seed", type=int, default=0, help="another number, other images (default: 0)")
    arguments = parser.parse_args()
    images = arguments.folder / "pictures"
    images.mkdir(parents=True, exist_ok=True)
    seeds = DEMO_SEEDS[arguments.first_seed : arguments.first_seed + arguments.num_rows]
    with open(arguments.folder / "requests.jsonl", "w", encoding="utf-8") as file:
        for seed in seeds:
            draw = draw_json_example if seed % 4 == 3 else draw_example
            file.write(json.dumps(request(seed, draw(seed), images)) + "\n")
    print(f"{len(seeds)} requests in {file.name}, their images in {images}")


def request(seed: int, example: Example, images: Path) -> dict[str, Any]:
    """One row of OpenAI's batch format; its images are saved below `images` and named relative to it."""
    parts: list[dict[str, Any]] = []
    for index, image in enumerate(example.images):
        name = f"{seed:04d}-{index}.png"
        image.save(images / name)
        parts.append({"type": "image_url", "image_url": {"url": name}})
    body: dict[str, Any] = {"model": "shapes-vl", "messages": example.messages(parts), "temperature": 0,
                            "max_tokens": 96}
    if example.schema is not None:
        described = {"name": "drawing", "schema": example.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": described}
    body["metadata"] = {"expected": example.answer, "kind": example.kind}
    return {"custom_id": f"drawing-{seed:04d}", "method": "POST", "url": "/v1/chat/completions", "body": body}


if __name__ == "__main__":
    main()
