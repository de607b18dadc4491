"""What an Ascend device cannot do is refused by name, not by an error number of CANN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann, run_python
from tests.npu.start import host_with

pytestmark = pytest.mark.npu

PROGRAM = """
import sys
from npu_runner import LLM
from npu_runner.errors import ConfigError
try:
    LLM(sys.argv[1], platform="npu", dtype="float32", graph_mode="eager", max_model_len=512, max_num_seqs=2)
except ConfigError as refusal:
    print(refusal)
"""


def test_float32_is_refused_with_the_remedy(checkpoint: Any) -> None:
    model: Path = checkpoint("qwen3", num_hidden_layers=1)
    done = run_python(["-c", PROGRAM, str(model)], forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "dtype float32: the fused attention of Ascend devices takes float16 and bfloat16; set dtype" in done.stdout


HEAD_DIMS = """
import sys
from npu_runner import LLM, SamplingParams
from npu_runner.errors import ConfigError
for model in sys.argv[1:]:
    try:
        with LLM(model, platform="npu", dtype="bfloat16", graph_mode="eager", max_model_len=512, max_num_seqs=2) as llm:
            print(len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids), "tokens")
    except ConfigError as refusal:
        print(refusal)
"""


@pytest.mark.skipif(has_real_cann(), reason="what the kernel takes is chosen here")
def test_a_head_dim_that_the_kernel_refuses_is_named_before_weights_load(checkpoint: Any, tmp_path: Path) -> None:
    """8 s. The document names 128 and 192; a model of 64 has no weights here, so that nobody can have loaded them."""
    sizes = {size: checkpoint("qwen3", num_hidden_layers=1, head_dim=size) for size in (64, 128)}
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in sizes[64].iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    done = run_python(["-c", HEAD_DIMS, str(bare), str(sizes[128])], forked=True, paged_head_dims="128,192",
                      **host_with("9.2.0", tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    refused, served = done.stdout.splitlines()[-2:]
    assert refused.startswith("CANN 9.2.0: attention over the paged cache, 4/2 heads of 64 (bfloat16): refused, ")
    assert "561002" in refused
    assert served == "2 tokens", "128 is in every document"
