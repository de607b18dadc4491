"""Vectors, states, classes and log probabilities of prompts on the npu platform are those of the cpu platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cann.environment import has_real_cann, run_python
from tests.npu.programs.reading import read
from tests.npu.running import DEVICE_MEMORY, FLOAT32, SMALL
from tests.oracle.classifiers import make_classifier

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.full("engines of three families, twice each; reading is made of operators that generating has")
@pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16 elsewhere")
def test_vectors_and_scores_of_prompts_equal_the_cpus(checkpoint: Any, tmp_path: Path) -> None:
    cases = [{"model": str(checkpoint(model_type)), "count": 5,
              "settings": {**SMALL, **FLOAT32, "platform": "npu", "max_num_batched_tokens": 128}}
             for model_type in ("qwen3", "qwen3_vl", "qwen3_5_text")]
    for case in cases[::2]:  # transformers has no class for the other one
        case["classifier"] = str(make_classifier(Path(case["model"]), tmp_path / Path(case["model"]).name))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = run_python(["-m", "tests.npu.programs.reading", str(tmp_path / "cases.json"), str(tmp_path / "found.json")],
                      timeout=900, memory_bytes=DEVICE_MEMORY, allow_fp32_attention=True)
    assert done.returncode == 0, done.stderr[-8000:]
    for case, found in zip(cases, json.loads((tmp_path / "found.json").read_text()), strict=True):
        settings = {**SMALL, "dtype": "float32", "platform": "cpu", "max_num_batched_tokens": 128}
        expected = read({**case, "settings": settings})
        assert found["decode_steps"] == 0
        assert found["fallbacks"] == {}, "nothing leaves the AI core, nor sorts indices"
        for ours, theirs in zip(found["vectors"], expected["vectors"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        for ours, theirs in zip(found["states"], expected["states"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        np.testing.assert_allclose(found["classes"], expected["classes"], atol=1e-4)
        assert len(found["classes"]) == (5 if "classifier" in case else 0)
        for ours, theirs in zip(found["scores"], expected["scores"], strict=True):
            np.testing.assert_allclose(np.array(ours)[:, 1:], np.array(theirs)[:, 1:], atol=1e-3)
            assert np.mean(np.array(ours)[:, 0] == np.array(theirs)[:, 0]) > 0.95, "but for near ties"
