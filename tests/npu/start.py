"""A start of one model on the emulated CANN that compares its operators, with one that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cann.environment import run_python
from tests.npu.hosts import toolkit

START = """
import json, sys
from npu_runner import LLM, SamplingParams
from npu_runner.errors import ConfigError
try:
    with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
        outputs = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        print(json.dumps({**llm.engine.describe(), "graphs": llm.engine.info.graphs, "tokens": outputs[0].token_ids}))
except ConfigError as refusal:
    print(json.dumps({"refusal": str(refusal)}))
"""


def host_with(cann: str, folder: Path) -> dict[str, str]:
    """The emulation's switch, and a toolkit that says the same. Operators are compared, and findings kept there."""
    return {"cann_version": cann, "NPU_RUNNER_ASCEND_CASES": "on", "HOME": str(folder),
            **toolkit(folder / "cann", cann)}


def start(model: Path, folder: Path, fail: str, *, cann: str = "8.5.0", **settings: Any) -> dict[str, Any]:
    """What a start says of itself, with its tokens, where this operator of the emulation fails; or what ends it."""
    settings = {"platform": "npu", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 2,
                "max_num_batched_tokens": 512, **settings}
    done = run_python(["-c", START, str(model), json.dumps(settings)], fail=fail, **host_with(cann, folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}
