"""Scores of documents on the npu platform are those of the cpu platform."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cann.environment import has_real_cann, run_python
from tests.npu.programs.ranking import rank
from tests.npu.running import DEVICE_MEMORY, FLOAT32, SMALL
from tests.oracle.reranker_checkpoints import make_reranker

pytestmark = pytest.mark.npu


@pytest.mark.full("an engine with a tower on the emulated device; a score is a matmul and a sum, as vectors have them")
@pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16 elsewhere")
def test_scores_of_texts_and_images_equal_the_cpus(tmp_path: Path) -> None:
    path = str(make_reranker(tmp_path / "model", "qwen3_vl"))
    (tmp_path / "settings.json").write_text(json.dumps({**SMALL, **FLOAT32, "platform": "npu"}))
    done = run_python(["-m", "tests.npu.programs.ranking", path, str(tmp_path / "settings.json"),
                       str(tmp_path / "found.json")],
                      timeout=900, memory_bytes=DEVICE_MEMORY, allow_fp32_attention=True)
    assert done.returncode == 0, done.stderr[-8000:]
    found = json.loads((tmp_path / "found.json").read_text())
    expected = rank(path, {**SMALL, "dtype": "float32", "platform": "cpu"})
    assert found["decode_steps"] == 0
    assert found["fallbacks"] == {}, "nothing leaves the AI core, nor sorts indices"
    assert min(found["cached"]) >= 128, "a block holds what stands before the documents"
    np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-5)
