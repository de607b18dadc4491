"""Paged attention on CUDA through FlashInfer's wrappers, where it is installed. Knows nothing of models or requests.

FlashInfer takes the pages of a step as one flat list, on the host, before each step. `plan` of its wrappers divides the
work and copies the result to the device. Each sliding window has a wrapper of its own, whose pages begin with the first
that is seen. Graphs are not planned on the host: their decode steps use our own kernels.

T tokens, B sequences, N query heads, K kv heads, H head dim, W blocks per sequence, P pages of the step.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.attention import ends_of_tokens
from npu_runner.platforms.cuda import Capability, too_old
from npu_runner.platforms.cuda.attention.backend import TritonAttention
from npu_runner.platforms.step_inputs import AttentionMetadata

_SINCE: Capability = (7, 5)
_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
# FlashInfer's own recommendation for partial results; zeros, as it asks.
_WORKSPACE_BYTES = 128 << 20
_LAYOUT = "NHD"  # (NB, S, K, H), as our caches are


def why_not(head_dim: int, dtype: torch.dtype, capability: Capability) -> str | None:
    """None when FlashInfer is installed and computes these on a GPU of this compute capability, else the reason."""
    if capability < _SINCE:
        return too_old("flashinfer", _SINCE, capability)
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if dtype not in _DTYPES:
        return f"flashinfer takes float16 and bfloat16, not {dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"flashinfer takes a head dim of {', '.join(map(str, _HEAD_DIMS))}, not {head_dim}"
    return None


class Pages(NamedTuple):
    """Where a step's context lies. firsts_B1 and last_lens_B int32 in pinned host memory, indices_P on the device.

    Row b has the pages firsts[b] to firsts[b + 1] of `indices_P`, the last of them holds last_lens[b] tokens.
    """

    firsts_B1: Tensor
    indices_P: Tensor
    last_lens_B: Tensor


def find_pages(context_lens_B: np.ndarray, block_tables_BW: np.ndarray, block_size: int, device: torch.device,
               first_pages_B: np.ndarray | None = None) -> Pages:
    """`first_pages_B`: pages at the beginning of each context that are left out."""
    ends_B = -(-context_lens_B // block_size)
    starts_B = np.zeros_like(ends_B) if first_pages_B is None else first_pages_B
    firsts_B1 = np.zeros(len(ends_B) + 1, dtype=np.int32)
    np.cumsum(ends_B - starts_B, out=firsts_B1[1:])
    places_W = np.arange(int(ends_B.max()))
    is_used_BW = (places_W >= starts_B[:, None]) & (places_W < ends_B[:, None])
    indices_P = _pinned(block_tables_BW[:, :len(places_W)][is_used_BW]).to(device, non_blocking=True)
    return Pages(_pinned(firsts_B1), indices_P, _pinned((context_lens_B - 1) % block_size + 1))


def first_seen_pages(context_lens_B: np.ndarray, query_lens_B: np.ndarray, window: int | None,
                     block_size: int) -> np.ndarray | None:
    """The page of each context where the window of its first new token begins; None without a window."""
    if window is None:
        return None
    pages_B: np.ndarray = np.maximum(0, context_lens_B - query_lens_B - window + 1) // block_size
    return pages_B


class FlashInferAttention(TritonAttention):
    """The cache is written, and images are seen, as in TritonAttention."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype):
        reason = why_not(head_dim, dtype, torch.cuda.get_device_capability())
        if reason:
            raise ConfigError(f"attention_backend flashinfer: {reason}; take triton or auto")
        super().__init__(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
                         dtype=dtype)
        # Compiles its kernels on first use, says so and keeps them; ranks of one host wait for each other.
        import flashinfer

        self._flashinfer = flashinfer
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        shape = {"num_qo_heads": num_heads, "num_kv_heads": num_kv_heads, "page_size": block_size}
        kinds = {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": head_dim**-0.5}
        self._prefill_settings = {**shape, **kinds, "head_dim_qk": head_dim, "causal": True}
        self._decode_settings = {**shape, **kinds, "head_dim": head_dim}
        self._prefills: dict[int | None, Any] = {}
        self._decodes: dict[int | None, Any] = {}

    def _make_prompts(self) -> None:
        """FlashInfer computes prompts."""

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> dict[int | None, Any]:
        """The wrapper of each window."""
        queries_B, contexts_B = (np.asarray(lens, dtype=np.int32) for lens in (query_lens_B, context_lens_B))
        rows_B1 = np.zeros(len(queries_B) + 1, dtype=np.int32)
        np.cumsum(queries_B, out=rows_B1[1:])
        for window in self.windows:
            if window not in self._prefills:
                self._prefills[window] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
            _wait()
            self._prefills[window].plan(_pinned(rows_B1), *self._pages(contexts_B, queries_B, block_tables_BW, window),
                                        window_left=_window_left(window), **self._prefill_settings)
        return self._prefills

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device,
                    query_lens_B: Sequence[int] | None = None) -> dict[int | None, Any]:
        if query_lens_B is not None:
            block_tables_BW = block_tables_BW[np.repeat(np.arange(len(query_lens_B)), query_lens_B)]
            context_lens_B = ends_of_tokens(query_lens_B, context_lens_B).tolist()
        contexts_B = np.asarray(context_lens_B, dtype=np.int32)
        for window in self.windows:
            if window not in self._decodes:
                # Its kernels without tensor cores take one query head each; these take all of a kv head's.
                self._decodes[window] = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, _LAYOUT, use_tensor_cores=True)
            self._plan_decode(self._decodes[window], contexts_B, block_tables_BW, window)
        return self._decodes

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        self._check(scale)
        out_TNH: Tensor = metadata.plan[window].run(q_TNH.contiguous(), (k_cache, v_cache))
        return out_TNH

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        if metadata.plan is None:  # part of a graph
            return super().decode(q_BNH, k_cache, v_cache, metadata, scale, window=window)
        self._check(scale)
        out_BNH: Tensor = metadata.plan[window].run(q_BNH.contiguous(), (k_cache, v_cache))
        return out_BNH

    def _plan_decode(self, wrapper: Any, contexts_B: np.ndarray, block_tables_BW: np.ndarray,
                     window: int | None) -> None:
        pages = self._pages(contexts_B, np.ones_like(contexts_B), block_tables_BW, window)
        _wait()
        wrapper.plan(*pages, window_left=_window_left(window), **self._decode_settings)

    def _pages(self, contexts_B: np.ndarray, queries_B: np.ndarray, block_tables_BW: np.ndarray,
               window: int | None) -> Pages:
        firsts_B = first_seen_pages(contexts_B, queries_B, window, self.block_size)
        return find_pages(contexts_B, block_tables_BW, self.block_size, self._device, firsts_B)

    def _check(self, scale: float) -> None:
        planned = self._decode_settings["sm_scale"]
        assert math.isclose(scale, planned), f"planned for a scale of {planned}, asked for {scale}"


def _pinned(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).pin_memory()


def _wait() -> None:
    """Until the device has done what it was given: it may still be reading what the next `plan` of a wrapper writes.

    That is the pinned buffer of the wrapper, whose copy to the device is queued behind the step before.
    """
    torch.cuda.current_stream().synchronize()


def _window_left(window: int | None) -> int:
    """FlashInfer counts the tokens before one's own; -1 is all."""
    return -1 if window is None else window - 1
