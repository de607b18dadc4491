"""What regress_ascend.sh compares: every setting that the platform can have in two ways, its default first."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest

from tests.cann.environment import ROOT, run_python

sys.path.insert(0, str(ROOT / "scripts"))
from compare_ascend import COMPARISONS, PREFIX, as_rows

SETTINGS = "npu_runner.platforms.npu.settings"


def test_every_setting_of_the_platform_is_compared_with_its_default_first() -> None:
    if importlib.util.find_spec(SETTINGS) is None:
        pytest.skip("the platform has no such settings")
    choices: dict[str, tuple[str, ...]] = importlib.import_module(SETTINGS).CHOICES
    for name, values in choices.items():
        if name == "cases":  # whether a start checks its operators: both values compute the same
            continue
        sides = [variables for variables, _ in COMPARISONS[name].sides.values()]
        assert sides == [{PREFIX + name.upper(): value} for value in values]


def test_each_comparison_has_sides_that_differ() -> None:
    for name, comparison in COMPARISONS.items():
        sides = [json.dumps(side) for side in comparison.sides.values()]
        assert len(set(sides)) == len(sides) > 1, name
        assert comparison.question.endswith("?")


def test_a_side_that_fails_or_chooses_other_tokens_says_so() -> None:
    medians: dict[str, dict[str, Any]] = {
        "one": {"step_ms": 1.5, "same_tokens": True}, "two": {"step_ms": 1.25, "same_tokens": False},
        "three": {"error": "ConfigError: no", "same_tokens": False}}
    rows = list(as_rows("capture", COMPARISONS["capture"], medians))
    assert rows[1].split() == ["one", "1.50", "step_ms"]
    assert rows[2].split() == ["two", "1.25", "step_ms", "other", "tokens"]
    assert rows[3].split() == ["three", "ConfigError:", "no"]


@pytest.mark.npu
@pytest.mark.full("a job for each side of a comparison; batch jobs stay, and what the script says of sides that differ")
def test_a_batch_job_is_compared_through_the_normal_path() -> None:
    command = ["scripts/compare_ascend.py", "--size", "tiny", "--repeats", "1", "--only", "threads"]
    done = run_python(command, timeout=500, memory_bytes=2 << 30)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["found"]["threads"]
    assert list(found) == ["not set", "OMP_NUM_THREADS=4", "OMP_NUM_THREADS=8"]
    assert all(figures["rows_per_s"] > 0 and figures["same_tokens"] for figures in found.values())
