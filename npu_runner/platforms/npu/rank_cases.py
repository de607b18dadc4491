"""Cases of collectives: ranks, each a process with a device of its own, behind attention, eagerly and in a graph.

    python -m npu_runner.platforms.npu.rank_cases RANK COUNT COLLECTIVE CAPTURED FOLDER

is one rank; rank 0 writes its output to FOLDER/output.pt. All ranks compute with the same numbers (cases.py).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from npu_runner.platforms import find_platform
from npu_runner.platforms.cases import Case, Side
from npu_runner.platforms.host import what_went_wrong
from npu_runner.platforms.npu.attention_cases import replay
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.processes.child import Child

_ROWS, _COUNTS = 8, (2, 4, 8, 16)
_SECONDS = 150
Forward = Callable[[Tensor, AttentionMetadata], Tensor]


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
    """As many ranks as there are devices, in powers of two. No step of ours has an all_to_all, captured or not."""
    for count in _COUNTS:
        if count <= torch.npu.device_count():
            yield from (_case(name, count, is_captured=False) for name in COLLECTIVES)
            yield from (_case(name, count, is_captured=True) for name in ("all_reduce", "all_gather"))


def _case(name: str, count: int, *, is_captured: bool) -> Case:
    def expected(side: Side, width: int, num_rows: int) -> tuple[Forward, tuple[()]]:
        return lambda x, metadata: COLLECTIVES[name][1](x, count), ()

    def prepare(side: Side) -> Callable[[], Tensor]:
        if side.platform.name != "npu":
            return replay(16, 8, 128, num_rows=_ROWS, behind=expected).prepare(side)
        return partial(_run_ranks, name, count, is_captured)

    return Case(name=f"{name} of {count} ranks, {'in a captured graph' if is_captured else 'eager'}", prepare=prepare,
                is_timed=False)


def _run_ranks(name: str, count: int, is_captured: bool) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(count)]
        with ExitStack() as files:
            ranks = [Child(f"rank {rank}", __name__, rank, count, name, int(is_captured), folder,
                           output=files.enter_context(log.open("w"))) for rank, log in enumerate(logs)]
            try:
                ends = [rank.exit_status(_SECONDS) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
        for number, (end, log) in enumerate(zip(ends, logs, strict=True)):
            if (error := what_went_wrong(end, _SECONDS, log.read_text(errors="replace"))) is not None:
                raise RuntimeError(f"rank {number}: {error}")
        output: Tensor = torch.load(Path(folder, "output.pt"))
        return output


def main(arguments: list[str]) -> None:
    rank, count, name, is_captured, folder = arguments
    platform = find_platform("npu")
    assert platform.why_unavailable() is None, "the process that started this one has a device"
    platform.devices.prepare_process(int(rank), int(count))
    dist.init_process_group(
        platform.communicators.backend, store=dist.FileStore(f"{folder}/store", int(count)), rank=int(rank),
        world_size=int(count), timeout=timedelta(seconds=_SECONDS),
        pg_options=platform.communicators.options(serves_graphs=is_captured == "1", is_second=False))
    platform.communicators.make(dist.group.WORLD, int(rank))

    def behind(side: Side, width: int, num_rows: int) -> tuple[Forward, tuple[()]]:
        return lambda x, metadata: COLLECTIVES[name][0](x), ()

    with torch.inference_mode():
        side = Side(platform, torch.bfloat16, int(rank))
        output = replay(16, 8, 128, num_rows=_ROWS, behind=behind, is_captured=is_captured == "1").prepare(side)()
    if rank == "0":
        torch.save(output.cpu(), Path(folder, "output.pt"))
    torch.npu.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
