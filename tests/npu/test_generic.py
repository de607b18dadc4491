"""Models through transformers' modules, in captured graphs: tokens are those of transformers' own network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import run_python
from tests.full_set import only_full
from tests.npu.family_cases import emulated
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint

pytestmark = [pytest.mark.npu, pytest.mark.slow]
pytest.importorskip("transformers")
GRAPHS: dict[str, Any] = {"graph_mode": "reduce-overhead", **SMALL, **FLOAT32, "graph_batch_sizes": [4]}


@emulated
@pytest.mark.parametrize("model_type", ["gemma3_text", *only_full("one kind of decoder each", "granite", "gpt2",
                                                                           "mixtral", "cohere2")])
def test_captured_graphs(model_type: str, tmp_path: Path) -> None:
    path = make_foreign_checkpoint(tmp_path / "model", model_type)
    case = Case(str(path), GRAPHS, "texts", 7)
    (result,) = on_npu([case], tmp_path)
    assert result["tokens"] == on_cpu(case)["tokens"]
    assert_graphs_are_whole(result, [4])


@emulated
def test_a_capture_that_cannot_begin_leaves_nothing_on(tmp_path: Path) -> None:
    """torch_npu's dispatch mode would take the attention of prefills for that of a capture."""
    path = make_foreign_checkpoint(tmp_path / "model", "gemma")
    case = Case(str(path), {**GRAPHS, "graph_mode": "auto"}, "texts", 3)
    (result,) = on_npu([case], tmp_path, fail="aclmdlRICaptureBegin:1+:507899")
    assert result["tokens"] == on_cpu(case)["tokens"]
    assert result["graphs"].startswith("none")


NOT_CAPTURED = """
import torch, torch_npu
from torch.utils._python_dispatch import _get_current_dispatch_mode
from npu_runner.platforms.graphs import GraphCaptureError
from npu_runner.platforms.npu.graphs import _capture
torch.npu.set_device(0)
sums, stream = torch.zeros(4, device="npu"), torch.npu.current_stream()
try:
    with _capture(torch.npu.NPUGraph(), torch.npu.graph_pool_handle()):
        sums.add_(1).cpu()
except GraphCaptureError as error:
    print("implicit synchronisation" in str(error))
print(_get_current_dispatch_mode(), torch.npu.current_stream() == stream, sums.add_(1).cpu().tolist())
"""


@emulated
def test_a_capture_that_cannot_go_on_leaves_nothing_on(tmp_path: Path) -> None:
    done = run_python(["-c", NOT_CAPTURED])
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-2:] == ["True", "None True [1.0, 1.0, 1.0, 1.0]"]
