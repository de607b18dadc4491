"""One of several ranks: the smallest block count of all, asked for as the runner does.

    RANK=... WORLD_SIZE=... python -m tests.npu.programs.smallest
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - brings the device

from npu_runner.layers.parallel import TensorParallel

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

if __name__ == "__main__":
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl", timeout=timedelta(seconds=120))
    tp = TensorParallel(rank=RANK, size=SIZE, group=dist.group.WORLD)
    print("SMALLEST", tp.minimum(2**31 - 1 - RANK, torch.device("npu", RANK)), flush=True)
    dist.destroy_process_group()
