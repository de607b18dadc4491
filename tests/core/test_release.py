"""CHANGELOG.md and the package agree on the version."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

from npu_runner import __version__

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\] - (\S+)$", PAGE, flags=re.MULTILINE)


def test_the_newest_release_is_the_version() -> None:
    assert ".".join(RELEASES[0][:3]) == __version__


def test_releases_stand_newest_first_under_what_is_unreleased() -> None:
    numbers = [tuple(map(int, each[:3])) for each in RELEASES]
    dates = [date.fromisoformat(each[3]) for each in RELEASES]
    assert numbers == sorted(set(numbers), reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert re.findall(r"^## .*", PAGE, flags=re.MULTILINE)[0] == "## [Unreleased]"
    assert len(re.findall(r"^## ", PAGE, flags=re.MULTILINE)) == len(RELEASES) + 1, "a heading of another form"
