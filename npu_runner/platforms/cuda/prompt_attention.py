"""Attention of prompts on Hopper through a kernel in CUDA C++ (prompt_attention.cu). Knows nothing of models.

T tokens, N query heads, K kv heads, G = N / K, H head dim, NB blocks of S tokens.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import CompiledSource, LoadedKernel, tensor_map

_HEAD_DIM, _ROWS, _COLUMNS, _CHUNK, _THREADS = 128, 128, 128, 64, 384
_STAGES = 2


class PromptAttention:
    def __init__(self, group: int, num_kv_heads: int, block_size: int, dtype: torch.dtype, device: torch.device, num_sms: int, **extra: int):
        stages = extra.get("STAGES", _STAGES)
        constants = {"GROUP": group, "BLOCK_SIZE": block_size, "IS_BFLOAT16": int(dtype == torch.bfloat16), **extra}
        source = CompiledSource(Path(__file__).with_suffix(".cu"), constants, "sm_90a")
        shared = 2 * _HEAD_DIM * (_ROWS + 2 * stages * _COLUMNS) + 1024 + 256
        self.kernel = LoadedKernel(source.cubin(), "attend_prompts", shared)
        self.group, self.num_kv_heads = group, num_kv_heads
        self.tokens_a_tile = _ROWS // group
        self.counters = torch.zeros(2, dtype=torch.int32, device=device)
        self.num_sms = num_sms

    def __call__(self, q_TNH, k_cache, v_cache, tiles, tables, scale):
        out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        q_map = tensor_map(q_TNH, (self.tokens_a_tile, self.group, 64))
        k_map, v_map = (tensor_map(c, (1, _CHUNK, 1, 64)) for c in (k_cache, v_cache))
        self.kernel.launch(min(self.num_sms, len(tiles) * self.num_kv_heads), _THREADS,
            [q_map, k_map, v_map, tiles, ctypes.c_int(len(tiles)), ctypes.c_int(self.num_kv_heads), tables,
             ctypes.c_int(tables.stride(0)), out, self.counters, ctypes.c_float(scale * math.log2(math.e))])
        return out
