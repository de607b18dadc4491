"""A hub's cache that holds one model, and no network: owner/name with the files that a test puts there."""

from __future__ import annotations

from pathlib import Path

import pytest

COMMIT = "0" * 40


def make_hub_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for the files of owner/name, in a cache below `root`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = root / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    files = model / "snapshots" / COMMIT
    files.mkdir(parents=True)
    return files
