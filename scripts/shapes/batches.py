"""Turns drawings into training batches. Knows the checkpoint's token and pixel format, but no model and no optimizer.

A sample asks several questions about the same images at once. They share one prefix (system turn, images) and
branch off after it: a branch sees the prefix and itself, never another branch, so each question is learned as if it
stood alone while the images are looked at only once. Some prefixes hold a first question and its answer as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.utils.data import Dataset
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from scripts.shapes.checkpoint import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH
from scripts.shapes.drawing import draw_group
from scripts.shapes.questions import (
    SYSTEM_PROMPTS,
    Question,
    group_questions,
    json_question,
    questions,
    text_question,
)
from scripts.shapes.scenes import draw_scene

PART_TEXT_ONLY, PART_WITH_SEVERAL_IMAGES = 0.02, 0.4
PART_QUESTION_FIRST, PART_SECOND_TURN, PART_WITH_SYSTEM = 0.25, 0.1, 0.3
PART_IN_JSON = 0.6  # of the samples with one image: one of their questions
PADDING_BRANCH = -1
LENGTH_MULTIPLE = 64
MAX_BRANCHES = 8
NUM_GRID_PER_SIDE = 20
"""Learned positions of the tower, along a side."""


@dataclass
class Sample:
    """One row of a batch under construction. positions: (time, height, width) of M-RoPE for each token."""

    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)  # index into `kinds` for tokens to be learned, else -1
    kinds: list[str] = field(default_factory=list)
    patches: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[int, int]] = field(default_factory=list)
    next_position: int = 0
    next_branch: int = 1

    def add_text(self, text: str, branch: int = 0, answer_of: int = -1) -> None:
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            self._add(token, branch, (self.next_position,) * 3, answer_of)
            self.next_position += 1

    def add_images(self, images: Sequence[Image.Image]) -> None:
        pad = self.tokenizer.token_to_id("<|image_pad|>")
        assert pad is not None, "the tokenizer was built without its special tokens"
        for image in images:
            patches, (rows, columns) = cut_patches(image)
            self.patches.append(patches)
            self.grids.append((rows, columns))
            self.add_text("<|vision_start|>")
            start = self.next_position
            for row in range(rows // MERGE):
                for column in range(columns // MERGE):
                    self._add(pad, 0, (start, start + row, start + column), -1)
            self.next_position = start + max(rows, columns) // MERGE
            self.add_text("<|vision_end|>")

    def add_answer(self, question: Question, branch: int = 0) -> None:
        self.add_text("<|im_end|>\n<|im_start|>assistant\n", branch)
        self.kinds.append(question.kind)
        self.add_text(f"{question.answer}<|im_end|>", branch, len(self.kinds) - 1)

    def add_branch(self, opening: str, question: Question) -> None:
        start = self.next_position
        self.add_text(f"{opening}{question.text}", self.next_branch)
        self.add_answer(question, self.next_branch)
        self.next_position, self.next_branch = start, self.next_branch + 1

    def _add(self, token: int, branch: int, position: tuple[int, int, int], answer_of: int) -> None:
        self.ids.append(token)
        self.branches.append(branch)
        self.positions.append(position)
        self.answers.append(answer_of)


def build_sample(seed: int, tokenizer: Tokenizer, max_things: int) -> Sample:
    rng = random.Random(seed)
    sample = Sample(tokenizer)
    if rng.random() < PART_WITH_SYSTEM:
        sample.add_text(f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n")
    if rng.random() < PART_TEXT_ONLY:
        for _ in range(4):
            sample.add_branch("<|im_start|>user\n", text_question(rng))
        return sample
    if rng.random() < PART_WITH_SEVERAL_IMAGES:
        scenes = draw_group(rng)
        asked = group_questions(scenes, rng) + group_questions(scenes, rng)
    else:
        scenes = [draw_scene(rng, max_things)]
        asked = questions(scenes[0], rng)
        if rng.random() < PART_IN_JSON:
            asked[rng.randrange(len(asked))] = json_question(scenes[0], rng)
    images = [scene.image for scene in scenes]
    question_first = rng.random() < PART_QUESTION_FIRST
    if question_first or rng.random() < PART_SECOND_TURN:
        question = asked.pop(rng.randrange(len(asked)))
        sample.add_text(f"<|im_start|>user\n{question.text if question_first else ''}")
        sample.add_images(images)
        if not question_first:
            sample.add_text(question.text)
        sample.add_answer(question)
        opening, asked = "\n<|im_start|>user\n", asked[: len(asked) // 2]
    else:
        sample.add_text("<|im_start|>user\n")
        sample.add_images(images)
        opening = ""
    for question in asked:
        sample.add_branch(opening, question)
    return sample


def cut_patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    """uint8 (rows * columns, 3, 256) in the image processor's order, and (rows, columns) of 16-pixel patches."""
    height, width = smart_resize(image.height, image.width, PATCH * MERGE, MIN_PIXELS, MAX_PIXELS)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    rows, columns = height // PATCH, width // PATCH
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, PATCH * PATCH), (rows, columns)


def _one_after_the_other(samples: Sequence[Sample]) -> tuple[list[np.ndarray], int, tuple[int, int]]:
    """The column of each token, sample by sample, and how many columns there are: padding stands behind."""
    return [np.arange(len(sample.ids)) for sample in samples], _up(max(len(sample.ids) for sample in samples)), (0, 0)


def _branches_of_one_length(samples: Sequence[Sample]) -> tuple[list[np.ndarray], int, tuple[int, int]]:
    """Likewise, for branched_delta_net.py: prefixes end at one column, branches of one length follow (G, L)."""
    counts = [np.bincount(sample.branches, minlength=2) for sample in samples]
    assert max(map(len, counts)) <= MAX_BRANCHES + 1, "a sample asks more than a row has room for"
    prefix = _up(max(count[0] for count in counts), 2 * LENGTH_MULTIPLE)
    length = _up(max(count[1:].max() for count in counts))
    grid = (MAX_BRANCHES, length)  # few shapes: layers are compiled for each
    columns = []
    for sample, count in zip(samples, counts, strict=True):
        branches = np.asarray(sample.branches)
        firsts = np.cumsum(count) - count
        starts = np.where(np.arange(len(count)) == 0, prefix - count[0], prefix + (np.arange(len(count)) - 1) * length)
        assert (np.diff(branches) >= 0).all(), "a prefix stands before its branches"
        columns.append(np.arange(len(branches)) - firsts[branches] + starts[branches])
    return columns, prefix + grid[0] * length, grid


def _up(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    return -(-int(length) // multiple) * multiple


def collate(samples: Sequence[Sample], *, by_branch: bool = False) -> dict[str, Any]:
    """Pads rows and packs patches. weights: each answer counts, long ones only with the root of their length."""
    columns_of, length, grid = (_branches_of_one_length if by_branch else _one_after_the_other)(samples)
    shape = (len(samples), length)
    ids, branches = np.zeros(shape, np.int64), np.full(shape, PADDING_BRANCH, np.int64)
    positions, answers = np.zeros((3, *shape), np.int64), np.full(shape, -1, np.int64)
    kinds: list[str] = []
    for row, sample in enumerate(samples):
        places = columns_of[row]
        ids[row, places], branches[row, places] = sample.ids, sample.branches
        positions[:, row, places] = np.asarray(sample.positions).T
        asked = np.asarray(sample.answers)
        answers[row, places] = np.where(asked >= 0, asked + len(kinds), -1)
        kinds += sample.kinds
    # Position i predicts token i + 1, and an answer never starts a row.
    rows, columns = np.nonzero(answers[:, 1:] >= 0)
    owners = answers[rows, columns + 1]
    grids = [grid for sample in samples for grid in sample.grids]
    grid_thw = torch.tensor([(1, *grid) for grid in grids])
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, num_grid_per_side=NUM_GRID_PER_SIDE, mode="bilinear", align_corners=True, spatial_merge_size=MERGE)
    lengths = [rows * columns for rows, columns in grids]
    return {
        "input_ids": torch.from_numpy(ids),
        "branches": torch.from_numpy(branches),
        "branch_grid": torch.empty(grid),
        "positions": torch.from_numpy(positions),
        "predicting": torch.from_numpy(rows * length + columns),
        "targets": torch.from_numpy(ids[rows, columns + 1]),
        "owners": torch.from_numpy(owners),
        "weights": torch.from_numpy(np.bincount(owners)[owners].astype(np.float32) ** -0.5),
        "patches": torch.from_numpy(np.concatenate([patches for sample in samples for patches in sample.patches])),
        "grid_thw": grid_thw,
        "interp_indices": indices,
        "interp_weights": weights,
        "vision_positions": get_vision_position_ids(grid_thw, MERGE),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
        "kinds": kinds,
    }


class Batches(Dataset[dict[str, Any]]):
    """Batch number i, always the same for the same seeds, however many workers draw."""

    def __init__(self, seeds: range, tokenizer_json: str, batch_size: int, num_batches: int, easy_batches: int = 0,
                 *, by_branch: bool = False):
        self.seeds, self.batch_size, self.num_batches = seeds, batch_size, num_batches
        self.easy_batches, self.by_branch = easy_batches, by_branch
        self.tokenizer_json = tokenizer_json
        self.tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_str(self.tokenizer_json)
        max_things = 2 if index < self.easy_batches else 5
        seeds = self.seeds[index * self.batch_size : (index + 1) * self.batch_size]
        samples = [build_sample(seed, self.tokenizer, max_things) for seed in seeds]
        return collate(samples, by_branch=self.by_branch)
