"""Attention of prompts on Hopper through a kernel in CUDA C++ (prompt_attention.cu). Knows nothing of models.

T tokens, B sequences, N query heads, K kv heads, G = N / K, H head dim, W blocks a sequence, NB blocks of S tokens.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import CompiledSource, LoadedKernel, NoKernel, tensor_map

logger = logging.getLogger(__name__)

_CAPABILITY, _ARCHITECTURE = (9, 0), "sm_90a"
_FOLDER = Path(__file__).parent
_SOURCES = (_FOLDER / "hopper.cu", _FOLDER / "prompt_attention.cu")
# As in the source: rows and context columns of a tile, tokens and dims that one copy brings, stages, threads.
_HEAD_DIM, _ROWS, _COLUMNS, _CHUNK, _DIMS, _STAGES, _THREADS = 128, 128, 128, 64, 64, 2, 384
# Queries, keys and values; barriers, and what the beginning is moved by.
_SHARED_BYTES = 2 * _HEAD_DIM * (_ROWS + 2 * _STAGES * _COLUMNS) + 256 + 1024
_LEAST_TOKENS = 512
"""Query tokens of a step from which on it is faster than Triton's kernel."""


def why_no_prompts(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> str | None:
    """None where the kernel takes such heads on this GPU, else the reason. `group`: query heads of a kv head."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _CAPABILITY:
        return "the GPU is not Hopper"
    if head_dim != _HEAD_DIM or group > _ROWS:
        return f"it has head dim {_HEAD_DIM} and up to {_ROWS} query heads of a kv head"
    if block_size % _CHUNK:
        return f"the block size is no multiple of {_CHUNK}"
    return None if dtype in (torch.bfloat16, torch.float16) else "it computes in 16 bits"


class PromptAttention:
    """The kernel for one shape of heads; compiled in a thread of its own while the model is read."""

    def __init__(self, *, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype, num_sms: int):
        self._num_kv_heads, self._group, self._num_sms = num_kv_heads, group, num_sms
        self.tokens_a_tile = _ROWS // group
        constants = {"GROUP": group, "BLOCK_SIZE": block_size, "IS_BFLOAT16": int(dtype == torch.bfloat16)}
        thread = ThreadPoolExecutor(1, "compile-prompts")
        self._cubin = thread.submit(CompiledSource(_SOURCES, constants, _ARCHITECTURE).cubin)
        thread.shutdown(wait=False)
        self._kernel: LoadedKernel | None = None
        self._is_there: bool | None = None

    def takes(self, query_lens_B: Sequence[int]) -> bool:
        """Whether a step of so many new tokens is faster by it. The first call waits until it is compiled."""
        if self._is_there is None:
            self._is_there = self._load()
        return self._is_there and sum(query_lens_B) >= _LEAST_TOKENS

    def _load(self) -> bool:
        try:
            self._kernel = LoadedKernel(self._cubin.result(), "attend_prompts", _SHARED_BYTES)
        except NoKernel as reason:
            logger.info("attention of prompts: triton (%s)", reason)
            return False
        # Which tile comes next, and how many programs are done: 0 before and after each launch.
        self._counters = torch.zeros(2, dtype=torch.int32, device="cuda")
        logger.info("attention of prompts of %d tokens and more: %s", _LEAST_TOKENS, _SOURCES[-1].name)
        return True

    def attend(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tables_BW: Tensor,
               scale: float) -> Tensor:
        """Causal attention of a step, (T, N, H). `tiles` as in PrefillPlan, of `tokens_a_tile` tokens; `scale` above 0.

        Queries and caches: 16-byte addresses and strides, heads of consecutive elements.
        """
        assert self._kernel is not None, "`takes` has loaded the kernel"
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        caches = (tensor_map(cache, (1, _CHUNK, 1, _DIMS)) for cache in (k_cache, v_cache))
        self._kernel.launch(min(self._num_sms, len(tiles) * self._num_kv_heads), _THREADS, [
            tensor_map(q_TNH, (self.tokens_a_tile, self._group, _DIMS)), *caches, tiles, ctypes.c_int(len(tiles)),
            ctypes.c_int(self._num_kv_heads), tables_BW, ctypes.c_int(tables_BW.stride(0)), out_TNH, self._counters,
            ctypes.c_float(scale * math.log2(math.e))])
        return out_TNH
