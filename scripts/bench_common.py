"""What the benchmarks share: which commit, which versions, which machine."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The short hash of the checkout, with + when files differ from it; "unknown" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
