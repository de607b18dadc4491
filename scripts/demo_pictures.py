"""Draws a folder of fresh images, a question that fits all of them and the schema of its answers: what scripts/demo.sh
begins with.

usage: demo_pictures.py FOLDER [--num-images N]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.shapes.drawing import DEMO_SEEDS
from scripts.shapes.questions import leftmost_question
from scripts.shapes.scenes import draw_scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets pictures/, question.txt and schema.json")
    parser.add_argument("--num-images", type=int, default=64)
    arguments = parser.parse_args()
    for seed in DEMO_SEEDS[:arguments.num_images]:
        scene = draw_scene(random.Random(seed))
        things = f"{len(scene.things)}-shapes" if len(scene.things) > 1 else "1-shape"
        path = arguments.folder / "pictures" / things / f"{seed:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene.image.save(path)
    question = leftmost_question(scene)
    (arguments.folder / "question.txt").write_text(question.text + "\n")
    (arguments.folder / "schema.json").write_text(json.dumps(question.schema, indent=2) + "\n")
    print(f"{arguments.num_images} images below {arguments.folder / 'pictures'}")


if __name__ == "__main__":
    main()
