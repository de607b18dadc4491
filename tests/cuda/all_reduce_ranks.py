"""A program: one of several ranks whose all-reduces are compared with float32 sums in rank order.

    python -m tests.cuda.all_reduce_ranks CASE RANK RANKS PORT NUM_CALLS [MOST_ONE_SHOT]

Ranks without a GPU of their own share one. Each prints a line once it is ready, and one with the number of wrong sums.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from npu_runner.engine.executors.worker import exchange_through
from npu_runner.platforms.cuda.all_reduce import CustomAllReduce
from npu_runner.platforms.cuda.ops import TritonOps

DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
POOL_BYTES, GRAPH_CALLS = 12 << 20, 50


class Inputs:
    """The inputs of all ranks, the same on each: a part of a pool per rank."""

    def __init__(self, num_ranks: int, most_bytes: int):
        self._random, self._most_vectors = random.Random(1), most_bytes // 16
        self._pools: dict[torch.dtype, list[Tensor]] = {}
        for dtype, bits in DTYPES.items():
            self._pools[dtype] = []
            for rank in range(num_ranks):
                generator = torch.Generator("cuda").manual_seed(rank)
                pool = torch.randn(POOL_BYTES // dtype.itemsize, device="cuda", generator=generator).to(dtype)
                pool[7::1001], pool[9::1003], pool[11::1007] = float("nan"), float("inf"), float("-inf")
                pool.view(bits)[13::1009] = -1  # the NaN that marks empty memory
                self._pools[dtype].append(pool)

    def draw(self) -> list[Tensor]:
        """One for each rank, of the same shape and dtype."""
        dtype = self._random.choice(list(DTYPES))
        most = self._most_vectors if self._random.random() < 0.1 else min(4096, self._most_vectors)
        vectors = self._random.choice([1, 2, 511, 512, 513, 1025, most, self._random.randint(1, most)])
        each = 16 // dtype.itemsize
        start = each * self._random.randrange(POOL_BYTES // 16 - vectors + 1)
        return [pool[start : start + each * vectors] for pool in self._pools[dtype]]


def is_wrong(found: Tensor, parts: list[Tensor]) -> Tensor:
    """Whether any bit differs from the sum in rank order, rounded once. All NaNs are equal."""
    total = parts[0].float().clone()  # float32 stays what it is
    for part in parts[1:]:
        total += part.float()
    expected, bits = total.to(found.dtype), DTYPES[found.dtype]
    same = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
    return ~same.all()


def delay(rng: random.Random) -> None:
    if rng.random() < 0.1:
        torch.cuda._sleep(rng.randrange(1, 400_000))
    if rng.random() < 0.02:
        time.sleep(0.002 * rng.random())


def eager_calls(reduce: CustomAllReduce, inputs: Inputs, rank: int, num_calls: int) -> Iterator[Tensor]:
    rng = random.Random(rank)
    for _ in range(num_calls):
        parts = inputs.draw()
        x = parts[rank].clone()
        delay(rng)
        assert reduce(x), "a message that it accepts"
        yield is_wrong(x, parts)


def replayed_calls(reduce: CustomAllReduce, inputs: Inputs, rank: int, num_calls: int) -> Iterator[Tensor]:
    """Graphs of many calls; between them stand kernels that start early, and between replays eager calls."""
    rng, ops = random.Random(rank), TritonOps()
    gain = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    given = [inputs.draw() for _ in range(GRAPH_CALLS)]
    places = [parts[rank].clone() for parts in given]

    def run() -> list[Tensor]:
        found = []
        for place in places:
            x = place.clone()
            assert reduce(x), "a message that it accepts"
            found.append(x)
            if x.dtype == torch.bfloat16 and x.numel() % 256 == 0:
                ops.rms_norm(x.view(-1, 256), gain, 1e-6)
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(max(1, num_calls // GRAPH_CALLS)):
        delay(rng)
        for x in found:
            x.zero_()
        graph.replay()
        for x, parts in zip(found, given, strict=True):
            yield is_wrong(x, parts)
        yield from eager_calls(reduce, inputs, rank, 2)


def norms(reduce: CustomAllReduce, rank: int, num_ranks: int, num_calls: int, is_one_shot: bool) -> Iterator[Tensor]:
    """Sums that are added to a residual and normed. The sum has its bits; the norm is compared with float64."""
    shared, own = random.Random(2), random.Random(rank)
    generator = torch.Generator("cuda").manual_seed(5)
    for _ in range(num_calls):
        dtype = shared.choice(list(DTYPES))
        num_tokens, width = shared.choice([1, 2, 63, 64, 65, 130, 256]), shared.choice([8, 72, 512, 4096, 4104, 5120])
        *parts, residual, weight = (torch.randn(sizes, device="cuda", generator=generator).to(dtype)
                                    for sizes in [(num_tokens, width)] * (num_ranks + 1) + [(width,)])
        found = reduce.add_rms_norm(parts[rank], residual, weight, 1e-6)
        if found is None:
            assert num_ranks > 2 or not is_one_shot, "a message that it accepts"
            continue
        delay(own)
        total = parts[0].float().clone()  # float32 stays what it is
        for part in parts[1:]:
            total += part.float()
        summed = (total.to(dtype).float() + residual.float()).to(dtype)
        yield (found[1] != summed).any()
        exact = summed.double()
        exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        numbers = torch.finfo(dtype)
        bound = numbers.eps * (16 * numbers.tiny + (16 if dtype == torch.float32 else 4) * exact.abs())
        yield ((found[0] - exact).abs() > bound).any()


def endless(reduce: CustomAllReduce, is_replayed: bool) -> None:
    """Until the process is killed."""
    x = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
    reduce(x)
    run: Callable[[], object] = lambda: reduce(x)
    if is_replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                reduce(x)
        run = graph.replay
    while True:
        for _ in range(10):
            run()
        torch.cuda.synchronize()


def main(case: str, rank: int, num_ranks: int, port: int, num_calls: int, most_one_shot: int | None = None) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    exchange = exchange_through(store, rank, num_ranks)
    reduce = CustomAllReduce(rank, num_ranks, exchange, most_one_shot=most_one_shot)
    inputs = Inputs(num_ranks, reduce.most_bytes)
    torch.cuda.synchronize()
    print("ready", flush=True)
    if case.startswith("endless"):
        endless(reduce, case == "endless-replayed")
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for found in (norms(reduce, rank, num_ranks, num_calls // 20, most_one_shot != 0),
                  *(calls(reduce, inputs, rank, num_calls // 2) for calls in (eager_calls, replayed_calls))):
        for each in found:
            wrong += each
    torch.cuda.synchronize()
    exchange(b"")  # no rank ends, and frees its memory, before all are done
    print("wrong", int(wrong.item()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
