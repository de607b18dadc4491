"""Cases of collectives: ranks, each a process with a device of its own, behind attention, eagerly and in a graph.

    python -m npu_runner.platforms.npu.rank_cases RANK COUNT COLLECTIVE CAPTURED STORE REPORTS

is one rank, which writes its output to the file REPORTS. All ranks compute with the same numbers (cases.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from npu_runner.platforms import find_platform
from npu_runner.platforms.cases import Case, Side
from npu_runner.platforms.host import Host, run_program
from npu_runner.platforms.npu.attention_cases import Behind, replay

_ROWS, _COUNTS = 8, (2, 4, 8, 16)
_SECONDS = 150


def _all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _all_gather(x: Tensor) -> Tensor:
    gathered = x.new_empty((dist.get_world_size() * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous())
    return gathered


def _all_to_all(x: Tensor) -> Tensor:
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x.contiguous())
    return swapped


COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "all_reduce": (_all_reduce, lambda x, count: x * count),
    "all_gather": (_all_gather, lambda x, count: x.repeat(count, 1)),
    "all_to_all": (_all_to_all, lambda x, count: x.chunk(count)[0].repeat(count, 1)),
}
"""The call of a rank, and its result for rank 0 where all ranks have the same input."""


def served() -> Iterator[Case]:
    """As many ranks as there are devices, in powers of two. No step of ours has an all_to_all."""
    for count in _COUNTS:
        if count <= torch.npu.device_count():
            for is_captured in (False, True):
                yield from (_case(name, count, is_captured=is_captured) for name in COLLECTIVES)


def _case(name: str, count: int, *, is_captured: bool) -> Case:
    def expected(side: Side, width: int, num_rows: int) -> Behind:
        return lambda x, metadata: COLLECTIVES[name][1](x, count), ()

    def prepare(side: Side) -> Callable[[], Tensor]:
        if side.platform.name != "npu":
            return replay(16, 8, 128, num_rows=_ROWS, behind=expected).prepare(side)
        return partial(_run_ranks, name, count, is_captured)

    return Case(name=f"{name} of {count} ranks, {'in a captured graph' if is_captured else 'eager'}", prepare=prepare,
                is_timed=False)


def _run_ranks(name: str, count: int, is_captured: bool) -> Tensor:
    """The output of rank 0."""
    environment = dict(os.environ)
    if name == "all_to_all":  # compiled, torch_npu's own operator takes the elements of a part for its rows
        environment["NPU_RUNNER_ASCEND_CAPTURE"] = "recorded"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as threads:
        arguments = [str(count), name, str(int(is_captured)), f"{folder}/store"]
        ends = list(threads.map(lambda rank: run_program(Host(environment=environment), __name__,
                                                         [str(rank), *arguments], _SECONDS), range(count)))
    for rank, end in enumerate(ends):
        if end.error is not None:
            raise RuntimeError(f"rank {rank}: {end.error}")
    return torch.tensor(ends[0].reports[0])


def main(arguments: list[str]) -> None:
    rank, count, name, is_captured, store, reports = arguments
    platform = find_platform("npu")
    assert platform.why_unavailable() is None, "the process that started this one has a device"
    platform.devices.prepare_process(int(rank), int(count))
    dist.init_process_group(
        platform.communicators.backend, store=dist.FileStore(store, int(count)), rank=int(rank),
        world_size=int(count), timeout=timedelta(seconds=_SECONDS),
        pg_options=platform.communicators.options(serves_graphs=is_captured == "1", is_second=False))
    platform.communicators.make(dist.group.WORLD, int(rank))

    def behind(side: Side, width: int, num_rows: int) -> Behind:
        return lambda x, metadata: COLLECTIVES[name][0](x), ()

    with torch.inference_mode():
        side = Side(platform, torch.bfloat16, int(rank))
        output = replay(16, 8, 128, num_rows=_ROWS, behind=behind, is_captured=is_captured == "1").prepare(side)()
    with open(reports, "w") as file:
        file.write(json.dumps(output.tolist()) + "\n")
    torch.npu.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
