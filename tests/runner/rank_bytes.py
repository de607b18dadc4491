"""What a real start takes on the cpu platform, as bytes of tensors: the oracle of estimates. Knows no estimate.

    python -m tests.runner.rank_bytes RANK RANKS STORE EXPERTS CHECKPOINT...    # a line of JSON for each checkpoint

EXPERTS is whole or sliced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npu_runner import RunnerConfig
from npu_runner.layers.parallel import TensorParallel
from npu_runner.runner.model_runner import ModelRunner
from npu_runner.strategies import open_checkpoint

SETTINGS: dict[str, Any] = {"platform": "cpu", "max_model_len": 256, "max_num_seqs": 5, "max_num_batched_tokens": 128,
                            "kv_cache_bytes": 1 << 20}


def settings_for(path: Path, num_ranks: int, *, has_whole_experts: bool = False) -> RunnerConfig:
    """With a number of snapshots where the model has states: without a device memory decides nothing."""
    config = RunnerConfig.from_keywords(path, tensor_parallel_size=num_ranks,
                                        enable_expert_parallel=has_whole_experts, **SETTINGS)
    has_states = "linear_num_key_heads" in (path / "config.json").read_text()
    return config.replace(max_state_snapshots=3) if has_states else config


def bytes_of_start(path: Path, tp: TensorParallel) -> dict[str, int]:
    runner = ModelRunner(open_checkpoint(settings_for(path, tp.size, has_whole_experts=tp.has_whole_experts)), tp)
    try:
        parameters = sum(tensor.nbytes for tensor in (*runner.model.parameters(), *runner.model.buffers()))
        assert runner.profile_run().weights_bytes == parameters
        return {"weights": parameters, "kv_cache": runner.k_cache.nbytes + runner.v_cache.nbytes,
                "states": runner.states.num_bytes if runner.states else 0}
    finally:
        runner.close()


def main(rank: str, num_ranks: str, store: str, experts: str, *checkpoints: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(num_ranks))
    tp = TensorParallel(int(rank), int(num_ranks), dist.group.WORLD, has_whole_experts=experts == "whole")
    for path in checkpoints:
        print(json.dumps(bytes_of_start(Path(path), tp)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
