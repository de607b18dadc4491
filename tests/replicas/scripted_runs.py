"""Runs of a scripted job over replicas, and its answers where nothing ended them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.batch.scripted import row
from tests.replicas.jobs import (
    ended,
    start_scripted,
)

NUM_ROWS = 150


def rows(**special: str) -> list[Any]:
    texts = {f"r{n}": f"{n:03d}" + "x" * (n % 17) for n in range(NUM_ROWS)} | special
    return [row(name, text, temperature=n % 2) for n, (name, text) in enumerate(texts.items())] + [b"not json"]


def run(folder: Path, **options: Any) -> tuple[int, str]:
    return ended(start_scripted(folder, **options))


def lines(folder: Path) -> list[bytes]:
    return sorted((folder / "out.jsonl").read_bytes().splitlines())
