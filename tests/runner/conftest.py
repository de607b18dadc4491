"""A small model that most tests of this folder ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.oracle.running import SMALL


@pytest.fixture(scope="module")
def path(checkpoint: Any) -> Path:
    folder: Path = checkpoint("qwen3")
    return folder


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    with LLM(path, platform=platform_name, **SMALL) as llm:
        yield llm
