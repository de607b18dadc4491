"""Starts ranks of a program on the emulated CANN, or on a real one."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

from tests import zygote

from .environment import ROOT, environment, has_real_cann

A3 = {"soc": "Ascend910_9382"}
AIV = {"HCCL_OP_EXPANSION_MODE": "AIV"}


def run_ranks(size: int, mode: str, *, program: str = "tests.cann.programs.hccl_rank", **options: object) -> list[str]:
    """Starts `size` ranks and returns what each printed; a rank that fails fails the test with its output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment(num_devices=size, memory_bytes=256 << 20, **options)  # type: ignore[arg-type]
    env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", program, mode]
    start: Any = subprocess.Popen if has_real_cann() else zygote.Popen
    ranks = [
        start(
            command, env=env | {"RANK": str(rank)}, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, f"{out}\n{err[-4000:]}"
    return [out for out, _ in outputs]
