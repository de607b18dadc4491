"""Collectives inside a graph: the communicator of that name does them, as it does outside of graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .memory import GraphEngineError, device_empty, runtime, to_device, uncounted
from .operators import Call, on_device, register

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def group_of(call: Call) -> Any:
    """The process group whose HCCL communicator has the name in the operator's attribute."""
    name = call.attribute("group")
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) != "hccl":
            continue
        backend = group._get_backend(torch.device("npu"))
        if backend.get_hccl_comm_name(dist.get_rank(), init_comm=False) == name:
            return group
    raise GraphEngineError(f"there is no communicator called {name}")


@contextmanager
def graph_engine() -> Iterator[None]:
    """Collectives inside are the graph engine's: done when it ends, since the interpreter reads memory itself."""
    finish()
    runtime.cann_emu_graph_engine(1)
    try:
        yield
        finish()
    finally:
        runtime.cann_emu_graph_engine(0)


def finish() -> None:
    with uncounted():
        torch.npu.synchronize()


@register("HcomAllReduce")
def all_reduce(call: Call) -> Tensor:
    result = to_device(call.hosts()[0])
    with graph_engine():
        dist.all_reduce(result, op=REDUCTIONS[call.attribute("reduction", "sum")], group=group_of(call))
    return result


@register("HcomAllGather")
def all_gather(call: Call) -> Tensor:
    mine = on_device(call["x"])
    result = device_empty((call.attribute("rank_size") * mine.shape[0], *mine.shape[1:]), mine.dtype)
    with graph_engine():
        dist.all_gather_into_tensor(result, mine, group=group_of(call))
    return result
