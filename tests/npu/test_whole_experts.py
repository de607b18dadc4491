"""Ranges of experts on the emulated device, whose rows behind those that are here hold no numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann, run_python

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts launches"),
]

# Two masks, one of them with a copy; places; whether anything is here; zeros if not.
MORE_LAUNCHES = 6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("experts") / "out.json"
    done = run_python(["-m", "tests.npu.programs.held_experts", str(results)])
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(json.loads(Path(results).read_text()))


def test_they_add_up_and_a_range_that_nobody_chose_gives_nothing(found: dict[str, Any]) -> None:
    for name, distance in found["distances"].items():
        assert distance < (1e-5 if "float32" in name else 2e-2), name  # NaN is not less
        assert found["of_nothing"][name] == 0, name


def test_some_experts_take_few_launches_more_than_all(found: dict[str, Any]) -> None:
    few, many = (sum(found[f"launches of {name}"].values()) for name in ("all", "some"))
    assert many - few == MORE_LAUNCHES, found
