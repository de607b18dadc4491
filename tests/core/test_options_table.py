"""docs/options.md names every option, so that none is added, renamed or dropped in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig, flat_fields

OPTIONS = (Path(__file__).parents[2] / "docs" / "options.md").read_text()


@pytest.mark.parametrize("settings", [BatchOptions, RunnerConfig])
def test_the_docs_explain_every_option_and_no_other(settings: type) -> None:
    flags = {"--" + name.replace("_", "-") for name in flat_fields(settings)}
    table = set(re.findall(r"^\| `(--[a-z-]+)` \|", OPTIONS, flags=re.MULTILINE))
    assert flags <= table
    every = {"--" + name.replace("_", "-") for kind in (BatchOptions, RunnerConfig) for name in flat_fields(kind)}
    assert table <= every
