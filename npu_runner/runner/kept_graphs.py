"""Whether a compiled graph that an earlier run left behind may be used: what it was made of, and what it answers.

Knows nothing of how graphs are compiled or stored.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import npu_runner
from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.graphs import DecodeForward
from npu_runner.runner.block_tables import BlockTables
from npu_runner.runner.buckets import Bucket
from npu_runner.runner.dummy import dummy_decode

_NUM_TOKENS = 4
# Eager and compiled steps round differently in 16 bits: by a few parts in a hundred of the logits' spread at most.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


def source_fingerprint(model: nn.Module) -> str:
    """A hash over our own sources, and over those of the model's classes from other packages (but torch's)."""
    own = Path(npu_runner.__file__).parent
    files = set(own.rglob("*.py"))
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            files.add(Path(inspect.getfile(type(module))))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def agrees_with_eager(bucket: Bucket, eager: DecodeForward, attention: AttentionBackend,
                      fill: Callable[[ScheduledBatch], dict[str, np.ndarray]], reset_states: Callable[[], None], *,
                      last_tokens: Tensor, tables: BlockTables, num_blocks: int, vocab_size: int,
                      dtype: torch.dtype) -> bool:
    """Whether the bucket's graph gives the logits of `eager` for a few made-up tokens; both write the same keys.

    Only while cache and states are nobody's: blocks 1 and up are written, one for each sequence as far as they go.
    `fill` puts a step into the bucket's buffers, padded, and returns what they hold; `reset_states` makes all zeros.
    `last_tokens` and `tables` are written, too.
    """
    num_rows = min(bucket.batch_size, num_blocks - 1)
    made_up = [dummy_decode(num_rows, place + 1) for place in range(_NUM_TOKENS)]
    rng = np.random.default_rng(0)
    tokens = [torch.from_numpy(rng.integers(0, vocab_size, num_rows, dtype=np.int32)) for _ in made_up]
    for step in made_up:
        step.new_blocks_N3 = np.array([(row, 0, row + 1) for row in range(num_rows)], dtype=np.int32)
    device = bucket.buffer.device
    # One after the other: each must begin with the same states.
    reset_states()
    for step, ids in zip(made_up, tokens, strict=True):
        last_tokens[:num_rows].copy_(ids)
        padded = fill(step)
        plan = attention.plan_decode(padded["context_lens"].tolist(), tables.on_host_SW[padded["table_slots"]], device)
        expected = eager(bucket.inputs, plan)[:num_rows].float()
    reset_states()
    for step, ids in zip(made_up, tokens, strict=True):
        last_tokens[:num_rows].copy_(ids)
        fill(step)
        logits = bucket.forward(bucket.inputs)[:num_rows].float()
    spread = float(expected.std())
    return bool(((logits - expected).abs().max() <= _TOLERANCE[dtype] * max(spread, 1e-6)).item())
