"""Tiles, parts and plans of the attention kernels: whatever the sizes, they fit and leave nothing out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from npu_runner.platforms.cuda.attention.backend import TritonAttention
from npu_runner.platforms.cuda.attention.tiles import (
    NUMBERS_OF_PARTS,
    decode_tile,
    head_width,
    num_decode_parts,
    prefill_tile,
    tower_tile,
)
from npu_runner.platforms.cuda.gpu import Gpu

HEAD_DIMS = [16, 20, 64, 72, 80, 96, 128, 192, 256]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared_kib", [99, 163, 227])
def test_tiles_fit_into_the_shared_memory_of_the_gpu(shared_kib: int, dtype: torch.dtype) -> None:
    gpu = Gpu(100, shared_kib << 10)
    for head_dim in HEAD_DIMS:
        for tile in (decode_tile(head_dim, 4, dtype, gpu), decode_tile(head_dim, 4, dtype, gpu, from_fp8=True),
                     prefill_tile(head_dim, 4, dtype, gpu), tower_tile(head_dim, dtype, gpu)):
            assert tile.shared_bytes(head_width(head_dim), dtype.itemsize) <= gpu.shared_bytes
            assert min(tile.rows, tile.columns) >= 16, "what matmuls take"


@pytest.mark.parametrize("group", [1, 7, 16, 71, 200])
def test_all_query_heads_of_a_kv_head_are_in_one_tile(group: int) -> None:
    for choose in (decode_tile, prefill_tile):
        assert choose(128, group, torch.bfloat16, Gpu.current()).rows >= group


def test_numbers_of_parts_are_those_that_are_compiled_before_serving() -> None:
    found = {num_decode_parts(batch, kv_heads, 132) for batch in range(1, 600) for kv_heads in (1, 2, 8)}
    assert found <= {1, *NUMBERS_OF_PARTS}


@pytest.mark.parametrize("group", [1, 4, 7])
def test_the_tiles_of_a_prefill_hold_every_token_once_longest_contexts_first(group: int) -> None:
    backend = TritonAttention(num_heads=2 * group, num_kv_heads=2, head_dim=64, block_size=64, dtype=torch.bfloat16)
    queries, contexts = [1, 128, 300, 33], [900, 128, 301, 33]
    plan = backend.plan_prefill(queries, contexts, np.zeros((4, 16), dtype=np.int32), torch.device("cpu"))
    tiles, tokens_a_tile = plan.tiles["tiles"], backend.prefill_tile.rows // group
    places = tiles[:, 3].tolist()
    assert places == sorted(places, reverse=True)
    found = sorted((sequence, first_row + i, place + i) for sequence, first_row, left, place in tiles.tolist()
                   for i in range(min(left, tokens_a_tile)))
    starts = np.cumsum([0, *queries])
    assert found == [(b, starts[b] + i, contexts[b] - queries[b] + i) for b in range(4) for i in range(queries[b])]
