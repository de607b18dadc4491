"""Attention on the CPU that reads its tiles while it runs, as a kernel does on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.cpu.attention import CpuAttention
from npu_runner.platforms.step_inputs import AttentionMetadata


class TiledAttention(CpuAttention):
    """Reads tiles while it runs, as a kernel does on a device. A tile is a sequence."""

    def most_graph_tiles(self, num_tokens: int, num_sequences: int) -> dict[str, int]:
        return {"tiles": num_sequences}

    def graph_tiles(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int],
                    num_tokens: int) -> dict[str, np.ndarray]:
        lens_B, ends_B = np.array(query_lens_B), np.array(context_lens_B)
        tiles = np.stack([np.arange(len(lens_B)), np.cumsum(lens_B) - lens_B, lens_B, ends_B - lens_B], axis=1)
        return {"tiles": tiles.astype(np.int32)}

    def plan_of_tiles(self, tiles: Mapping[str, Tensor]) -> Tensor:
        return tiles["tiles"]

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        if not isinstance(metadata.plan, Tensor):
            return super().prefill(q_TNH, k_cache, v_cache, metadata, scale, window=window)
        out_TNH = torch.zeros_like(q_TNH)
        rows, _, lens, starts = metadata.plan[metadata.plan[:, 2] > 0].T.tolist()
        if rows:
            ends = [start + length for start, length in zip(starts, lens, strict=True)]
            plan = self.plan_prefill(lens, ends, metadata.block_tables_BW.numpy()[rows], q_TNH.device)
            out_TNH[: sum(lens)] = super().prefill(q_TNH[: sum(lens)], k_cache, v_cache, replace(metadata, plan=plan),
                                                   scale, window=window)
        return out_TNH
