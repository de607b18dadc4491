"""Whether a compiled graph that an earlier run left behind may be used: what it was made of, and what it answers.

Knows nothing of how graphs are compiled or stored.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import npu_runner
from npu_runner.platforms.base import AttentionBackend, DecodeForward

# B sequences, W blocks per sequence, V vocabulary

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


def agrees_with_eager(compiled: DecodeForward, eager: DecodeForward, inputs: dict[str, Tensor],
                      attention: AttentionBackend, *, num_blocks: int, block_size: int, vocab_size: int,
                      dtype: torch.dtype) -> bool:
    """Whether `compiled` gives the logits of `eager` for a few made-up tokens; both write the same into the cache.

    Only while the cache is nobody's: blocks 1 and up are written, one for each sequence as far as they go. `inputs` are
    the bucket's own buffers, filled here; rows without a block of their own stay padding.
    """
    batch_size = len(inputs["input_ids"])
    num_rows = min(batch_size, num_blocks - 1)
    rng = np.random.default_rng(0)
    logits = [torch.zeros(0), torch.zeros(0)]
    for place in range(_NUM_TOKENS):
        context_lens, block_tables = _fill(inputs, rng, place, num_rows, block_size, vocab_size)
        plan = attention.plan_decode(context_lens.tolist(), block_tables, inputs["input_ids"].device)
        attention.plan_replay(context_lens, block_tables)
        arguments = [inputs[name] for name in ("input_ids", "positions", "slot_mapping", "context_lens",
                                               "block_tables")]
        logits[0] = eager(*arguments, plan)[:num_rows].float()
        logits[1] = compiled(*arguments)[:num_rows].float()
    spread = float(logits[0].std())
    return bool(((logits[0] - logits[1]).abs().max() <= _TOLERANCE[dtype] * max(spread, 1e-6)).item())


def _fill(inputs: dict[str, Tensor], rng: np.random.Generator, place: int, num_rows: int, block_size: int,
          vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Also returns context lengths (B,) and block tables (B, W), int32."""
    batch_size = len(inputs["input_ids"])
    is_real = np.arange(batch_size) < num_rows
    blocks = np.where(is_real, np.arange(batch_size) + 1, 0)
    offsets = np.where(is_real, place, np.arange(batch_size) % block_size)
    context_lens = np.where(is_real, place + 1, 1)
    values = {
        "input_ids": np.where(is_real, rng.integers(0, vocab_size, batch_size), 0),
        "positions": context_lens - 1, "slot_mapping": blocks * block_size + offsets, "context_lens": context_lens,
    }
    for name, array in values.items():
        inputs[name].copy_(torch.from_numpy(array.astype(np.int32)))
    tables = np.zeros(tuple(inputs["block_tables"].shape), dtype=np.int32)
    tables[:, 0] = blocks
    inputs["block_tables"].copy_(torch.from_numpy(tables))
    return context_lens.astype(np.int32), tables
