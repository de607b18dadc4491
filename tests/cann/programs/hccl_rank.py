"""One rank of a group: every collective against what it must be. RANK and WORLD_SIZE say who it is."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch_npu

from .emulation import calls, error_of, reset_counters

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mine(rank: int, length: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(length) + 10 * rank).to(dtype)


def expect(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), wanted)


def check_reductions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = mine(RANK, dtype=dtype).npu()
        dist.all_reduce(x)
        expect(x, sum(mine(rank, dtype=torch.float32) for rank in range(SIZE)).to(dtype))
    x = mine(RANK).npu()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    expect(x, mine(SIZE - 1))
    large = torch.full((700_001,), float(RANK + 1)).npu()  # more than one round through the shared slot
    dist.all_reduce(large)
    expect(large, torch.full((700_001,), SIZE * (SIZE + 1) / 2))


def check_gathers_and_scatters() -> None:
    out = torch.empty(5 * SIZE).npu()
    dist.all_gather_into_tensor(out, mine(RANK).npu())
    expect(out, torch.cat([mine(rank) for rank in range(SIZE)]))
    parts = [torch.empty(5).npu() for _ in range(SIZE)]
    dist.all_gather(parts, mine(RANK).npu())
    for rank, part in enumerate(parts):
        expect(part, mine(rank))
    share = torch.empty(5).npu()
    dist.reduce_scatter_tensor(share, mine(RANK, 5 * SIZE).npu())
    expect(share, sum(mine(rank, 5 * SIZE) for rank in range(SIZE))[5 * RANK : 5 * RANK + 5])
    x = mine(RANK).npu()
    dist.broadcast(x, src=SIZE - 1)
    expect(x, mine(SIZE - 1))


def check_messages() -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    incoming = torch.empty(200_000).npu()
    outgoing = torch.full((200_000,), float(RANK)).npu()
    if RANK % 2 == 0:
        dist.send(outgoing, right)
        dist.recv(incoming, left)
    else:
        dist.recv(incoming, left)
        dist.send(outgoing, right)
    expect(incoming, torch.full((200_000,), float(left)))


def check_collectives_in_a_graph() -> None:
    x = torch.zeros(4).npu()
    source = mine(RANK, 4).npu()
    dist.all_reduce(source.clone())  # the communicator is made outside
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.copy_(source)
        dist.all_reduce(x)
        x.mul_(2)
    expect(x, torch.zeros(4))
    for step in (1, 2):
        source.fill_(step * (RANK + 1))
        graph.replay()
        expect(x, torch.full((4,), float(step * SIZE * (SIZE + 1))))


def run_in_the_graph_engine(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    import torch_npu.dynamo.torchair  # noqa: F401 (makes the name torchair importable)
    import torchair

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = functional.all_reduce(x, "sum", group)
        return total * 2, functional.all_gather_tensor(x + 1, 0, group)

    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    backend = torchair.get_npu_backend(compiler_config=config)
    found: tuple[torch.Tensor, torch.Tensor] = torch.compile(
        function, backend=backend, dynamic=False, fullgraph=True
    )(mine(RANK).npu())
    return found


def check_collectives_in_a_graph_of_the_graph_engine() -> None:
    total, gathered = run_in_the_graph_engine(dist.new_group(list(range(SIZE))))
    expect(total, 2 * sum(mine(rank) for rank in range(SIZE)))
    expect(gathered, torch.cat([mine(rank) + 1 for rank in range(SIZE)]))


def check_barriers_and_counters() -> None:
    reset_counters()
    x = torch.ones(3).npu()
    dist.all_reduce(x)
    assert calls("launches")["HcclAllReduce"] == 1
    dist.barrier()


def leave(message: str) -> NoReturn:
    """Says what was found and ends the process, all ranks together: the store that others may still ask for lives in
    rank 0. torch's process group does not work after what the callers did, so nothing is destroyed."""
    print(message, flush=True)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"left-{RANK}", "")
    if RANK == 0:
        store.wait([f"left-{rank}" for rank in range(SIZE)])
    os._exit(0)


def share_a_communicator() -> None:
    """One for single operators and for the graph engine: refused."""
    dist.all_reduce(torch.ones(2).npu())
    message = error_of(lambda: run_in_the_graph_engine(dist.group.WORLD))
    is_refused = "one communicator for single operators and for the graph engine" in message
    leave("REFUSED" if is_refused else f"OTHER {message}")


def smallest_int64() -> None:
    """Refused where collectives are spread out on the device: on the vector cores, and on an A3's AI CPU."""
    message = error_of(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64).npu(), op=dist.ReduceOp.MIN))
    leave("REFUSED" if "int64 is not reduced" in message else f"OTHER {message}")


def make_a_second_communicator() -> None:
    """Refused where both would use the vector cores; not where each says for itself where it is spread out."""
    dist.all_reduce(torch.ones(2).npu())
    second = dist.new_group(list(range(SIZE)))
    message = error_of(lambda: dist.all_reduce(torch.ones(2).npu(), group=second))
    leave("REFUSED" if "a second communicator" in message else f"OTHER {message}")


def make_two_communicators_that_differ() -> None:
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_op_expansion_mode": 1}
    second = dist.new_group(list(range(SIZE)), pg_options=options)
    for group in (dist.group.WORLD, second):
        x = torch.ones(2).npu()
        dist.all_reduce(x, group=group)
        expect(x, torch.full((2,), float(SIZE)))
    print("BOTH", flush=True)


def capture_seven_graphs() -> None:
    x = torch.ones(4).npu()
    dist.all_reduce(x)
    torch.npu.synchronize()
    graphs = []

    def forever() -> None:
        for _ in range(7):
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                dist.all_reduce(x)
            graphs.append(graph)

    message = error_of(forever)
    is_refused = "error 207005" in message and "6 graphs with collectives" in message
    leave(f"REFUSED AFTER {len(graphs)}" if is_refused else f"OTHER {message}")


def replay_other_collectives(is_first_in_a_graph: bool) -> None:
    """Rank 0 replays a graph with one collective, the others a graph with two, or none at all."""
    x = torch.ones(4).npu()
    dist.all_reduce(x)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    if RANK == 0 or is_first_in_a_graph:
        with torch.npu.graph(graph):
            for _ in range(1 + (RANK > 0)):
                dist.all_reduce(x)
    message = error_of(graph.replay if RANK == 0 or is_first_in_a_graph else lambda: dist.all_reduce(x))
    is_named = "all ranks must capture the same ones" in message
    leave("NAMED" if is_named else f"OTHER {message}")


def miss_a_collective() -> None:
    """The last rank never joins the second one."""
    x = torch.ones(2).npu()
    dist.all_reduce(x)
    torch.npu.synchronize()
    if RANK == SIZE - 1:
        print("ABSENT", flush=True)
        os._exit(0)
    dist.all_reduce(x)
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        print("TIMED OUT" if "error 507048" in str(error) else f"OTHER {error}", flush=True)
    os._exit(0)


SPECIAL = {
    "absent": miss_a_collective,
    "shared": share_a_communicator,
    "int64": smallest_int64,
    "second": make_a_second_communicator,
    "two": make_two_communicators_that_differ,
    "seven": capture_seven_graphs,
    "longer": lambda: replay_other_collectives(True),
    "eager": lambda: replay_other_collectives(False),
}


def main() -> None:
    torch.npu.set_device(RANK % torch.npu.device_count())
    dist.init_process_group("hccl", timeout=timedelta(seconds=120))
    mode = sys.argv[1]
    if mode in SPECIAL:
        SPECIAL[mode]()
        return dist.destroy_process_group()
    for name, check in list(globals().items()):
        if name.startswith("check_") and (mode == "all" or "graph_engine" not in name):
            check()
            print(f"PASSED {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
