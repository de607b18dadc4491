"""All-reduces between the GPUs of this host, as the ranks of a decode step launch them: our kernel and NCCL.

    python -m bench.cuda.all_reduce [--rows 1 8 64 256] [--width 4096]

A graph has 73 of them one behind the other, as a step of 36 layers has. A figure is the median of its replays, on the
slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from bench.common import make_parser, print_result
from npu_runner.engine.executors.worker import exchange_through
from npu_runner.platforms.cuda.all_reduce import make_all_reduce

COUNT, REPLAYS, PORT = 73, 30, 29_731


def microseconds(reduce: Callable[[Tensor], object], x: Tensor) -> list[float]:
    """Of one all-reduce: median, least and most of the replays, each on its slowest rank."""
    def step() -> None:
        for _ in range(COUNT):
            reduce(x)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    taken = []
    for _ in range(REPLAYS + 3):
        x.normal_()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * start.elapsed_time(end) / COUNT)
    slowest = torch.tensor(taken[3:], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found = slowest.tolist()
    return [round(value, 2) for value in (statistics.median(found), min(found), max(found))]


def run(rank: int, num_ranks: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", PORT, num_ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
    own = make_all_reduce(rank, num_ranks, exchange_through(store, rank, num_ranks))
    ways: dict[str, Callable[[Tensor], object]] = {"NCCL": dist.all_reduce}
    if own is not None:
        ways["ours"] = own
    table = []
    for count in options.rows:
        x = torch.empty(count, options.width, device="cuda", dtype=torch.bfloat16)
        for name, reduce in ways.items():
            if name == "NCCL" or reduce(x):
                table.append({"rows": count, "way": name, "microseconds": microseconds(reduce, x)})
                if rank == 0:
                    print(f"{count:6d} rows  {name:5s} {table[-1]['microseconds']}", flush=True)
    if rank == 0:
        print_result("cuda.all_reduce", options, ranks=num_ranks, table=table)
    dist.barrier()
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = make_parser(__doc__, platform="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    processes.spawn(run, args=(num_ranks, options), nprocs=num_ranks)


if __name__ == "__main__":
    main()
