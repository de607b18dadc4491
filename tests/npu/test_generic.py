"""Models through transformers' modules, in captured graphs: tokens are those of transformers' own network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
