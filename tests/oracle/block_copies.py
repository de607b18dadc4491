"""Random copies of blocks, and the bytes that they leave in both caches."""

from __future__ import annotations

import random

import numpy as np
import torch

from npu_runner.platforms.attention import AttentionBackend

NUM_BLOCKS = 40


def assert_copies(attention: AttentionBackend, device: torch.device, dtype: torch.dtype, seed: int, *,
                  block_size: int = 16, num_heads: int = 2, head_dim: int = 64) -> None:
    """Copies between random blocks of caches with one to four layers. All bytes are compared; NaN are among them."""
    draw = random.Random(seed)
    sizes = draw.randint(1, 4), NUM_BLOCKS, block_size, num_heads, head_dim * dtype.itemsize
    blocks = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    targets, sources = blocks[: draw.randint(1, NUM_BLOCKS // 2)], blocks[NUM_BLOCKS // 2 :]
    pairs = [(draw.choice(sources), target) for target in targets]
    generator = torch.Generator().manual_seed(seed)
    expected = [torch.randint(256, sizes, dtype=torch.uint8, generator=generator) for _ in "kv"]
    k_cache, v_cache = (cache.clone().view(dtype).to(device) for cache in expected)
    attention.copy_blocks(k_cache, v_cache, np.array(pairs, dtype=np.int32))
    for cache, copied in zip(expected, (k_cache, v_cache), strict=True):
        for source, target in pairs:
            cache[:, target] = cache[:, source].clone()
        assert torch.equal(copied.cpu().view(torch.uint8), cache)
