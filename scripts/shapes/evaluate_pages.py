"""Reads pages of the evaluation's seeds with transformers' network, and counts the characters that are right.

    python -m scripts.shapes.evaluate_pages --model FOLDER --num-pages 500
    python -m scripts.shapes.evaluate_pages --model FOLDER --lines FILE     (a manual's text, set in the reader's fonts)
"""

from __future__ import annotations

import argparse
import json
import random
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import Qwen3VLForConditionalGeneration

from scripts.shapes.page_reader import PageForward
from scripts.shapes.pages import FONTS, MOST_CHARACTERS, MOST_LINES, PAGE_SEEDS, Block, Page, draw_page, fit, set_page
from scripts.shapes.train_pages import characters_right, collate


def manual_pages(texts: Iterable[str]) -> Iterator[Page]:
    """Pages with the ASCII lines of a text, wrapped to what a line holds, in one font after another."""
    lines = [line for text in texts if text.isascii() and text.isprintable()
             for line in textwrap.wrap(" ".join(text.split()), MOST_CHARACTERS - 2)]
    for number, first in enumerate(range(0, len(lines), MOST_LINES)):
        font = FONTS[number % len(FONTS)]
        rows = tuple((fit(line, font),) for line in lines[first:first + MOST_LINES])
        yield set_page([Block("lines", rows)], font, random.Random(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--num-pages", type=int, default=500)
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    texts = chosen.lines.read_text().splitlines() if chosen.lines else []
    pages = list(manual_pages(texts)) if texts else [draw_page(seed) for seed in PAGE_SEEDS["evaluation"]
                                                     [: chosen.num_pages]]
    pages = pages[: chosen.num_pages]
    model = Qwen3VLForConditionalGeneration.from_pretrained(chosen.model, dtype=torch.float32).to(chosen.device)
    forward, answers = PageForward(model.eval(), chosen.device), []
    for first in range(0, len(pages), chosen.batch_size):
        batch = collate(pages[first:first + chosen.batch_size], forward.tokenizer)
        answers += forward.read(batch["pages"])
    expected = [page.markdown for page in pages]
    worst = sorted(zip(answers, expected, strict=True), key=lambda pair: characters_right([pair[0]], [pair[1]]))[:3]
    for answer, right in worst:
        print(f"read:\n{answer}\nright:\n{right}\n")
    print(json.dumps({"pages": len(pages), "characters": sum(map(len, expected)),
                      "characters_right": round(characters_right(answers, expected), 5),
                      "pages_right": sum(map(str.__eq__, answers, expected))}))


if __name__ == "__main__":
    main()
