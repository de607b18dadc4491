"""Vectors as something to look at: their shape, their norms, and which of them point the same way. Knows no rows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npu_runner.batch.rows.endpoints import FAULTS, answers_of
from npu_runner.reports.fields import Sample

MAX_COMPARED = 2000
"""Of so many vectors each is compared with each."""
_BARS = 48
_HEIGHT = 8
_NEAREST = 3
_BLOCK = 256

# N vectors, D numbers in each, B rows of a block


def vectors_in(answer: dict[str, Any]) -> list[np.ndarray]:
    """float32 vectors of a result row that has any."""
    with contextlib.suppress(*FAULTS):
        form, items = answers_of(answer["response"]["body"])
        return [form.cells_of(item, None)["vector"] for item in items] if form.has_vectors else []
    return []


@dataclass
class VectorTable:
    """All vectors of a job: how many there are of each length, and their norms."""

    num_of_length: Counter[int] = field(default_factory=Counter)
    norms: Sample = field(default_factory=Sample)

    def add(self, vector_D: np.ndarray) -> None:
        self.num_of_length[len(vector_D)] += 1
        self.norms.add(float(np.linalg.norm(vector_D)))


def outline(vector_D: np.ndarray) -> str:
    """The path of an SVG, 48 wide and 16 high: neighbouring numbers in one bar, up for positive, down for negative."""
    parts = np.array_split(vector_D.astype(np.float64), min(_BARS, len(vector_D))) if len(vector_D) else []
    extremes = np.array([part[np.abs(part).argmax()] for part in parts])
    highest = np.abs(extremes).max(initial=0.0)
    if not 0 < highest < np.inf:
        return ""
    heights = np.rint(extremes / highest * _HEIGHT).astype(int)
    return "".join(f"M{place} 8v{-height}" for place, height in enumerate(heights) if height)


class Neighbour(NamedTuple):
    number: int
    similarity: float


def neighbours(vectors: Sequence[np.ndarray]) -> list[list[Neighbour]]:
    """For each vector the others of its length that are nearest by cosine, nearest first. It compares the first
    MAX_COMPARED; the others have none."""
    found: list[list[Neighbour]] = [[] for _ in vectors]
    by_length: dict[int, list[int]] = {}
    for number, vector_D in enumerate(vectors[:MAX_COMPARED]):
        by_length.setdefault(len(vector_D), []).append(number)
    for numbers in by_length.values():
        _compare(vectors, numbers, found)
    return found


def _compare(vectors: Sequence[np.ndarray], numbers: list[int], found: list[list[Neighbour]]) -> None:
    units_ND = np.stack([vectors[number] for number in numbers]).astype(np.float32)
    norms_N = np.linalg.norm(units_ND, axis=1, keepdims=True)
    units_ND = np.divide(units_ND, norms_N, out=np.zeros_like(units_ND), where=norms_N > 0)
    for first in range(0, len(numbers), _BLOCK):
        similarities_BN = units_ND[first : first + _BLOCK] @ units_ND.T
        for row, similarity_N in enumerate(similarities_BN, first):
            similarity_N[row] = -np.inf  # itself
            nearest = np.argsort(-similarity_N, kind="stable")[:_NEAREST]
            found[numbers[row]] = [Neighbour(numbers[place], float(similarity_N[place])) for place in nearest
                                   if np.isfinite(similarity_N[place])]
