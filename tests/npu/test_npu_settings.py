"""What the npu platform can do in two ways: both give the tokens of the cpu platform, and a mistake has a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runner.errors import ConfigError
from npu_runner.platforms.npu.settings import NpuSettings
from npu_runner.runner.buckets import Bucket, pad_into
from tests.cann.environment import has_real_cann
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, on_cpu, on_npu

BLOCK_SIZE = 4


def test_settings_come_from_the_environment_and_mistakes_are_named() -> None:
    assert NpuSettings.read({"PATH": "/bin"}) == NpuSettings()
    assert NpuSettings.read({"NPU_RUNNER_ASCEND_CAPTURE": "recorded"}).capture == "recorded"
    with pytest.raises(ConfigError, match="NPU_RUNNER_ASCEND_CAPTURE=record is not one of compiled, recorded"):
        NpuSettings.read({"NPU_RUNNER_ASCEND_CAPTURE": "record"})
    with pytest.raises(ConfigError, match="NPU_RUNNER_ASCEND_DECODE is no setting; known are NPU_RUNNER_ASCEND_DECO"):
        NpuSettings.read({"NPU_RUNNER_ASCEND_DECODE": "masked"})


def bucket(batch_size: int) -> Bucket:
    names = ("slot_mapping", "context_lens", "state_slots")
    host = {name: np.full(batch_size, 77, dtype=np.int32) for name in names}
    nothing = torch.zeros(1, dtype=torch.int32)
    return Bucket(batch_size, 1, nothing.numpy(), host, nothing, {}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("repeats_a_row", [False, True])
def test_padded_rows_read_the_shortest_real_row_and_write_each_to_its_own_null_slot(repeats_a_row: bool) -> None:
    arrays = {"slot_mapping": np.array([9, 13]), "context_lens": np.array([7, 3]), "state_slots": np.array([7, 4])}
    padded = pad_into(bucket(4), arrays, arrays["state_slots"], BLOCK_SIZE, max_num_seqs=8, repeats_a_row=repeats_a_row)
    assert padded["state_slots"].tolist() == [7, 4, 8, 9]
    assert padded["slot_mapping"].tolist() == [9, 13, 2, 3]
    assert padded["context_lens"].tolist() == ([7, 3, 3, 3] if repeats_a_row else [7, 3, 1, 1])
    assert padded["table_slots"].tolist() == ([7, 4, 4, 4] if repeats_a_row else [7, 4, 8, 8])
    few = pad_into(bucket(6), arrays, arrays["state_slots"], BLOCK_SIZE, max_num_seqs=8, num_states=3)
    assert few["state_slots"].tolist() == [7, 4, 8, 9, 10, 8]


SIDES = [
    ("reduce-overhead", {"NPU_RUNNER_ASCEND_REPLAY": "overlapped"}),
    ("reduce-overhead", {"NPU_RUNNER_ASCEND_DECODE_ATTENTION": "unmasked", "NPU_RUNNER_ASCEND_CAPTURE": "recorded"}),
    ("max-autotune", {"NPU_RUNNER_ASCEND_DECODE_ATTENTION": "unmasked", "NPU_RUNNER_ASCEND_GE_TILING": "device"}),
    ("eager", {"NPU_RUNNER_ASCEND_DECODE_ATTENTION": "unmasked"}),
    ("reduce-overhead", {"NPU_RUNNER_ASCEND_DECODE_ATTENTION": "unmasked"}),
    ("reduce-overhead", {"NPU_RUNNER_ASCEND_CAPTURE": "recorded"}),
]


def names_of(sides: list[tuple[str, dict[str, str]]]) -> list[str]:
    return ["-".join([mode, *setting.values()]) for mode, setting in sides]


emulated = pytest.mark.skipif(has_real_cann(), reason="compared in float32, which no device takes")


@pytest.mark.npu
@pytest.mark.slow
@emulated
@pytest.mark.full("settings other than the default's, and pairs of them; the default stays (test_tokens_equal_cpu.py)")
@pytest.mark.parametrize(("mode", "setting"), SIDES, ids=names_of(SIDES))
def test_each_other_side_gives_the_same_tokens(
    mode: str, setting: dict[str, str], checkpoint: Any, tmp_path: Path
) -> None:
    graphs: dict[str, Any] = {} if mode == "eager" else {"graph_batch_sizes": [2, 4]}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    settings = {"graph_mode": mode, **SMALL, **FLOAT32, **graphs}
    case = Case(str(checkpoint("qwen3_vl", tie_word_embeddings=True, num_hidden_layers=1,
                               vision={"deepstack_visual_indexes": [1]})), settings, "images", 3)
    (result,) = on_npu([case], tmp_path, **setting)
    assert result["tokens"] == on_cpu(case)["tokens"]
