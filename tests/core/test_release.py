"""CHANGELOG.md and the package agree on the version."""

from __future__ import annotations

import re
from pathlib import Path

from npu_runner import __version__

PAGE = Path(__file__).parents[2] / "CHANGELOG.md"


def test_the_newest_release_is_the_version() -> None:
    assert re.findall(r"^## \[(\d\S*)\] - ", PAGE.read_text(), flags=re.MULTILINE)[0] == __version__
