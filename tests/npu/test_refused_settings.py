"""What an Ascend device cannot do is refused by name, not by an error number of CANN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import run_python

pytestmark = pytest.mark.npu

PROGRAM = """
import sys
from npu_runner import LLM
from npu_runner.errors import ConfigError
try:
    LLM(sys.argv[1], platform="npu", dtype="float32", attention_backend=sys.argv[2], graph_mode="eager",
        max_model_len=512, max_num_seqs=2)
except ConfigError as refusal:
    print(refusal)
"""


@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_float32_is_refused_with_the_remedy(backend: str, checkpoint: Any) -> None:
    model: Path = checkpoint("qwen3", num_hidden_layers=1)
    done = run_python(["-c", PROGRAM, str(model), backend])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "dtype float32: the fused attention of Ascend devices takes float16 and bfloat16; set dtype" in done.stdout
