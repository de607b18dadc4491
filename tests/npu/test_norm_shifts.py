"""Shifts of norms on the npu platform: as near to float64 as plain torch is, in int8 of both kinds of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from tests.npu.int8_cases import DENSE, MODES, assert_near, case, logits, run
from tests.oracle.quantised_folders import read_all
from tests.oracle.rounded_models import rounded_models
from tests.oracle.shifted_norms import add_shifts, shifted

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize("name", ["modelslim-w8a8", "modelslim-w8a8-dynamic"])
def test_logits_are_as_near_as_plain_torch(name: str, checkpoint: Any, tmp_path: Path) -> None:
    plain = checkpoint("qwen3", **DENSE)
    folder = shifted(plain, tmp_path / "shifted", name)
    found = run([case(folder, **MODES[0])], tmp_path)
    with open_weights(folder, read_quantization(folder)) as reader:
        models = rounded_models(plain, reader)
    for model in models:
        add_shifts(model, read_all(folder))
    for tokens, ours in found["logits"]:
        assert_near(ours, *(logits(model, tokens) for model in models))
