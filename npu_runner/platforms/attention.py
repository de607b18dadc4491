"""A role of a platform: attention over the paged cache, and a vision tower's. Knows no vendor and no model.

T tokens of a step, B sequences of a step, N query heads, K kv heads, H head dim, W blocks per sequence, S block size,
NB blocks of the cache, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from npu_runner.errors import ConfigError, Contract
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.ops import HeadNorms, Ops
from npu_runner.platforms.step_inputs import AttentionMetadata


class AttentionBackend(Contract, ABC):
    """Attention over one layer's paged cache, k_cache and v_cache (NB, S, K, H)."""

    _REPLACED: ClassVar = {"plan_drafts": "plan_decode with query_lens_B",
                           "vision_head_dim": "AttentionFacts.vision_head_dims"}

    facts: AttentionFacts = AttentionFacts()
    """See `Platform.attention_backends`."""
    pads_with_real_rows: bool = False
    """Padded rows of a decode graph read what a real row reads. Short ones would slow down a kernel that depends on the
    shortest context. Each still writes to a slot of its own in the null block."""
    groups_drafts: bool = False
    """`decode` reads keys and values once for all tokens of a sequence, where a step has `StepInputs.sequences`."""
    windows: tuple[int | None, ...] = (None,)
    """The sliding windows of the model's layers, each once; None: some layer sees all. Steps are planned for these."""

    vision_patches: int | None = None
    """Patches that a vision tower should take at once, if it is not one image that has more; None: all of a step."""

    def with_kv_scales(self, scales_2: Tensor) -> AttentionBackend:
        """The same for a layer whose cache, in e4m3, holds its keys and values divided by these. float32 (2,), on the
        device: of keys, of values. For backends with an `fp8_prompt_room`."""
        raise AssertionError(f"{type(self).__name__} keeps keys and values in the model's dtype")

    @abstractmethod
    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> Any:
        """Host-side preparation of a prefill step, once for all layers."""

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device,
                    query_lens_B: Sequence[int] | None = None) -> Any:
        """Host-side preparation of an eager decode step, once for all layers; most kernels need none.

        `query_lens_B`: a sequence has several tokens, the last ones of its context. `decode` takes each as a row of its
        own, which sees the tokens before it. None: each has one.
        """
        return None

    def most_graph_tiles(self, num_tokens: int, num_sequences: int) -> dict[str, int]:
        """The most tiles of a captured prefill of `num_tokens` tokens and up to `num_sequences` sequences, by the name
        of their list. A tile is four numbers that say which keys some tokens attend to, and a kernel has a list of its
        own. For backends with `records_prefills`."""
        raise AssertionError(f"prefills of {type(self).__name__} are not captured")

    def graph_tiles(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int],
                    num_tokens: int) -> dict[str, np.ndarray]:
        """The tiles of one step for a graph of `num_tokens` tokens, int32 (tiles, 4) by the name of their list. A
        graph's list ends with zeros, which are empty tiles."""
        raise AssertionError(f"prefills of {type(self).__name__} are not captured")

    def plan_of_tiles(self, tiles: Mapping[str, Tensor]) -> Any:
        """The plan of a captured prefill, whose lists of `tiles` (most_graph_tiles, 4) lie on the device and change
        from replay to replay. Tokens that are in no tile attend to nothing; what they get is finite."""
        raise AssertionError(f"prefills of {type(self).__name__} are not captured")

    @abstractmethod
    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        """Store one step's keys and values."""

    def norm_rotary_store(self, ops: Ops, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None,
                          cos_TR: Tensor, sin_TR: Tensor, *, k_cache: Tensor, v_cache: Tensor,
                          slot_mapping_T: Tensor) -> Tensor:
        """Norm of each head of q and k, if there is one, `Ops.rotary`, and `write_kv`; q as attention takes it.

        Here operator by operator; a backend may have one kernel for all. May work in place on q and k.
        """
        if norms is not None:
            q_TNH = ops.rms_norm(q_TNH, norms.q_weight_H, norms.eps)
            k_TKH = ops.rms_norm(k_TKH, norms.k_weight_H, norms.eps)
        q_TNH, k_TKH = ops.rotary(q_TNH, k_TKH, cos_TR, sin_TR)
        self.write_kv(k_TKH, v_TKH, k_cache, v_cache, slot_mapping_T)
        return q_TNH

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, pairs_N2: np.ndarray) -> None:
        """Copy whole blocks within both caches of all layers, (L, NB, S, K, H). `pairs_N2`: int32, the source and the
        target of each copy; no target is a source or comes twice, so copies have no order.

        Scales of an FP8 cache belong to layers, so a block's bytes are all of it.
        """
        for source, target in pairs_N2.tolist():
            for cache in (k_cache, v_cache):
                cache[:, target] = cache[:, source]

    @abstractmethod
    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        """Causal attention of each sequence's new tokens over its whole context, (T, N, H).

        `window`, one of `windows`: a token sees the last `window` tokens, itself included. Earlier tokens must not be
        read: their blocks may be the null block in the table, or another sequence's in the cache.
        """

    @abstractmethod
    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        """Attention of one new token per sequence over its context, (B, N, H). Must be capturable in a graph.

        `window` as in `prefill`.
        """

    def plan_vision(self, lengths: Sequence[int], device: torch.device) -> Any:
        """Preparation of `vision` for consecutive images of these numbers of rows, once for all layers."""
        return list(lengths)

    @abstractmethod
    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: Any, scale: float) -> Tensor:
        """Full attention within each image, (T, N, H). `scale` is that of the model's own head dim."""


def tower_head_dim(facts: AttentionFacts, head_dim: int) -> int:
    """The head dim, `head_dim` or more, that `vision` computes. Towers pad their weights to it with zeros."""
    dims = (head_dim,) if facts.vision_head_dims is None else facts.vision_head_dims
    if head_dim > dims[-1]:
        raise ConfigError(f"vision head dim {head_dim}: the attention of this platform takes {dims[-1]} at most; use "
                          "another platform for this model")
    return next(dim for dim in dims if dim >= head_dim)


def ends_of_tokens(query_lens_B: Sequence[int], context_lens_B: Sequence[int]) -> np.ndarray:
    """int32 (T,): tokens of its sequence up to each of the step's, itself included."""
    spans = zip(query_lens_B, context_lens_B, strict=True)
    return np.concatenate([np.arange(end - num + 1, end + 1, dtype=np.int32) for num, end in spans])


def sequences_of_tokens(query_lens_B: Sequence[int] | np.ndarray, context_lens_B: Sequence[int] | np.ndarray,
                        num_tokens: int | None = None, num_sequences: int = 0) -> np.ndarray:
    """int32 (3, S), `StepInputs.sequences`: for each sequence the row of its block table, the running total of tokens
    up to its end, and its context length.

    A graph has fixed numbers of tokens and of sequences, at least two more than the step's. None is empty: some kernels
    need long for these. So the graph has `num_sequences` tokens of padding before the step's. These, and those behind
    it, are sequences of one token; the first of all has two or more, and the last one the rest.
    """
    queries_B = np.asarray(query_lens_B, dtype=np.int32)
    ends_B = queries_B.cumsum(dtype=np.int32)
    if num_tokens is None:
        return np.stack([ends_B - 1, ends_B, context_lens_B]).astype(np.int32)
    num_left = num_tokens - int(ends_B[-1])
    num_behind = min(num_left, num_sequences - len(queries_B) - 1)
    first = num_sequences - len(queries_B) - num_behind
    step = slice(first, first + len(queries_B))
    rows_S, queries_S = np.full(num_sequences, num_tokens - 1), np.ones(num_sequences, dtype=np.int32)
    rows_S[step], queries_S[step], queries_S[0] = ends_B - 1, queries_B, num_sequences - first + 1
    if num_behind:
        queries_S[-1] += num_left - num_behind
    lens_S = queries_S.copy()
    lens_S[step] = context_lens_B
    return np.stack([rows_S, queries_S.cumsum(), lens_S]).astype(np.int32)
