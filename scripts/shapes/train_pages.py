"""Trains the embedded page reader on fresh pages, in pieces that resume. Only transformers' Qwen3-VL is trained here.

    python -m scripts.shapes.train_pages --output OUT --total-seconds 1400 --piece-seconds 540 --compile

Each call goes on from OUT/state.*, trains for a piece, and writes the state and the checkpoint's folder. The learning
rate follows the seconds trained, pieces together. A head that is not kept names the glyphs in each cell of the image:
it teaches the tower its letters before the decoder can find them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3VLForConditionalGeneration, set_seed

from scripts.shapes.page_reader import (
    CELLS,
    END,
    IDS,
    LENGTHS,
    MERGE,
    MOST_TOKENS,
    NUM_CELLS,
    PATCH,
    PageForward,
    page_config,
    save_page_reader,
    tokenizer_json,
)
from scripts.shapes.pages import MOST_LINES, PAGE_SEEDS, Page, draw_page
from scripts.shapes.training import build_optimizer

SLOTS = 8  # columns of a cell, each with at most one glyph's middle
CHUNK = 12 << 20
IGNORED = -100
COMPILING_STEPS = 20


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--total-seconds", type=float, default=1400, help="of training, all pieces together")
    parser.add_argument("--piece-seconds", type=float, default=540, help="of this call, its start included")
    parser.add_argument("--steps", type=int, default=10**9, help="most steps of this call")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--warmup-steps", type=int, default=500)
    parser.add_argument("--easy-steps", type=int, default=1500, help="first steps, whose pages have one or two lines")
    parser.add_argument("--pages", type=int, default=0, help="train on so few pages, again and again")
    parser.add_argument("--most-lines", type=int, default=MOST_LINES)
    parser.add_argument("--held-out", type=int, default=64, help="pages that are read each minute")
    parser.add_argument("--report-seconds", type=float, default=60)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args(arguments)


class PageBatches(Dataset[dict[str, Any]]):
    """Batch number i, always the same."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.tokenizer = Tokenizer.from_str(tokenizer_json())

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen, seeds = self.arguments, PAGE_SEEDS["training"]
        numbers = [index * chosen.batch_size + place for place in range(chosen.batch_size)]
        numbers = [number % (chosen.pages or len(seeds)) for number in numbers]
        # Some full pages from the beginning, so that the change is no shock.
        easy = random.Random(index).random() < min(1.0, max(0.1, 2 - 2 * index / max(1, chosen.easy_steps)))
        lines = 2 if easy and index < chosen.easy_steps else chosen.most_lines
        return collate([draw_page(seeds[number], lines) for number in numbers], self.tokenizer)


def collate(pages: Sequence[Page], tokenizer: Tokenizer) -> dict[str, Any]:
    answers = np.full((len(pages), MOST_TOKENS), IGNORED, np.int64)
    glyphs = np.zeros((len(pages), NUM_CELLS, SLOTS), np.uint8)
    cell, longest = PATCH * MERGE, 0
    for row, page in enumerate(pages):
        ids = [*tokenizer.encode(page.markdown, add_special_tokens=False).ids, END]
        if len(ids) > MOST_TOKENS:
            raise ValueError(f"a page has {len(ids)} tokens; MOST_TOKENS is {MOST_TOKENS}")
        answers[row, : len(ids)] = ids
        longest = max(longest, len(ids))
        for glyph in page.glyphs:
            place = int(glyph.y) // cell * CELLS[1] + int(glyph.x) // cell
            glyphs[row, place, int(glyph.x) % cell * SLOTS // cell] = ord(glyph.character) - 31
    answers = answers[:, : -(-longest // LENGTHS) * LENGTHS]
    pixels = np.stack([np.asarray(page.image) for page in pages])
    return {"pages": torch.from_numpy(pixels), "answers": torch.from_numpy(answers), "glyphs": torch.from_numpy(glyphs)}


def losses(forward: PageForward, head: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of answers, of glyphs, and the part of answer tokens that are right."""
    device = forward.device
    answers, glyphs = batch["answers"].to(device), batch["glyphs"].to(device).long().flatten()
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        cells = forward.see(batch["pages"])
        logits = forward.logits(cells, answers.where(answers != IGNORED, IDS["<|endoftext|>"]))
        seen = head(cells).float().view(len(glyphs), -1)
    text = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
    each = nn.functional.cross_entropy(seen, glyphs, reduction="none")
    weights = torch.where(glyphs > 0, 1.0, 0.1)
    right = ((logits.argmax(-1) == answers).sum() / (answers != IGNORED).sum()).detach()
    return text, (each * weights).sum() / weights.sum(), right


def edit_distance(first: str, second: str) -> int:
    """Levenshtein's: insertions, deletions and replacements."""
    codes, steps = np.array([ord(character) for character in second]), np.arange(len(second) + 1)
    row = steps
    for number, character in enumerate(first, 1):
        replaced = np.concatenate([[number], np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))])
        row = np.minimum.accumulate(replaced - steps) + steps
    return int(row[-1])


def characters_right(read: Sequence[str], expected: Sequence[str]) -> float:
    """1 - edit distance / length, over all pages together."""
    distance = sum(edit_distance(*pair) for pair in zip(read, expected, strict=True))
    return 1 - distance / sum(map(len, expected))


def save_state(folder: Path, both: nn.Module, optimizer: torch.optim.Optimizer, **numbers: float) -> None:
    """In files of at most 12 MiB. Of Adam's moments the second alone, rounded: the first is new within ten steps."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    squares = [optimizer.state[each]["exp_avg_sq"].bfloat16() for each in parameters]
    buffer = io.BytesIO()
    torch.save({"weights": both.state_dict(), "squares": squares, **numbers}, buffer)
    data = buffer.getvalue()
    for index in range(0, len(data), CHUNK):
        (folder / f"state.{index // CHUNK}").write_bytes(data[index:index + CHUNK])


def load_state(folder: Path, both: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Step and seconds trained; zeros where there is no state."""
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("state.*")))
    if not data:
        return 0, 0.0
    state = torch.load(io.BytesIO(data), map_location=next(both.parameters()).device)
    both.load_state_dict(state["weights"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, square in zip(parameters, state["squares"], strict=True):
        optimizer.state[parameter] = {"step": torch.tensor(float(state["step"]), device=parameter.device),
                                      "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": square.float()}
    return int(state["step"]), float(state["seconds"])


def train(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """A piece. Returns its reports."""
    started = time.monotonic()
    set_seed(0)
    torch.set_float32_matmul_precision("high")
    device, folder = arguments.device, arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    model = Qwen3VLForConditionalGeneration(page_config()).to(device).train()
    head = nn.Linear(model.config.text_config.hidden_size, SLOTS * 96).to(device)
    both = nn.ModuleList([model, head])
    optimizer = build_optimizer(both, arguments)
    first, trained = load_state(folder, both, optimizer)
    forward = PageForward(model, device)
    if arguments.compile:
        torch._dynamo.config.recompile_limit = 64  # beyond it layers would run uncompiled without a word
        for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
            layer.compile(dynamic=False)
    held_out = [draw_page(seed, arguments.most_lines) for seed in PAGE_SEEDS["validation"][: arguments.held_out]]
    validation = collate(held_out, forward.tokenizer)
    drawn = {"num_workers": arguments.workers, "pin_memory": device != "cpu"}
    drawn |= {"prefetch_factor": 4, "multiprocessing_context": "spawn"} if arguments.workers else {}
    last = first + arguments.steps
    loader = iter(DataLoader(PageBatches(arguments), batch_size=None, sampler=range(first, last), **drawn))
    reports, step, waited, reported, clock = [], first, 0.0, time.monotonic(), time.monotonic()
    while step < last and trained < arguments.total_seconds and time.monotonic() - started < arguments.piece_seconds:
        waiting = time.monotonic()
        batch = next(loader)
        waited += time.monotonic() - waiting
        share = min(1.0, trained / arguments.total_seconds)
        rate = min(1.0, (step + 1) / arguments.warmup_steps) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * rate
        text, glyphs, right = losses(forward, head, batch)
        (text + glyphs * 0.5).backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step - first == COMPILING_STEPS:
            clock = time.monotonic()
        elif step - first > COMPILING_STEPS:
            trained, clock = trained + time.monotonic() - clock, time.monotonic()
        if time.monotonic() - reported > arguments.report_seconds or step == last:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                _, held_glyphs, held_right = losses(forward, head, validation)
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                read = forward.read(validation["pages"])
            report = {"step": step, "seconds": trained, "waited": waited, "lr": arguments.learning_rate * rate,
                      "loss": text.item(), "glyph_loss": glyphs.item(), "token_accuracy": right.item(),
                      "held_out_glyph_loss": held_glyphs.item(), "held_out_token_accuracy": held_right.item(),
                      "held_out_characters": characters_right(read, [page.markdown for page in held_out])}
            reports.append({name: round(value, 5) for name, value in report.items()})
            print(json.dumps(reports[-1]), flush=True)
            save_state(folder, both, optimizer, step=step, seconds=trained)
            reported = clock = time.monotonic()
    del loader
    save_state(folder, both, optimizer, step=step, seconds=trained)
    save_page_reader(model, folder / "shapes-reader")
    with (folder / "training_log.jsonl").open("a") as log:
        log.writelines(json.dumps(report) + "\n" for report in reports)
    return reports


if __name__ == "__main__":
    train(parse_arguments())
