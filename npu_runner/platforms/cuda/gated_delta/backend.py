"""Gated DeltaNet on CUDA through our own Triton kernels. Knows nothing of models or requests.

T tokens of a step, B sequences, Nk and Nv key and value heads, Dk and Dv their dims, C channels (queries, keys,
values), W convolution kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import launch_settings
from npu_runner.platforms.cuda.gated_delta import kernels as kernels
from npu_runner.platforms.cuda.gated_delta.ring_kernels import (
    delta_run_in_ring,
    delta_step_in_ring,
    plan_runs,
    tokens_in_mma,
)
from npu_runner.platforms.gated_delta import CHUNK_SIZE, GatedDeltaShape, Ring, RingedGatedDelta, StateSave, check_saves
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from npu_runner.platforms.transfers import upload_together

# The precision of float32 operands in a matmul with the model's dtype: see kernels.py.
_PRECISIONS = {torch.bfloat16: "split", torch.float16: "tf32x3", torch.float32: "ieee"}


class Launch(NamedTuple):
    """The channels, or rows of a state, of one program, and its launch settings."""

    size: int
    num_warps: int
    num_stages: int = 1


_CONVOLVE_STEP, _CONVOLVE_CHUNKS, _STORE_INPUTS = Launch(128, 1), Launch(64, 4), Launch(64, 1)
_STEP, _CHUNK_MATRICES, _INVERT, _SCAN = Launch(16, 1), Launch(0, 4), Launch(0, 2), Launch(32, 4, 2)
_PLAN = Launch(128, 1)


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """int32 tables on the device, by the columns that the kernels name; a row's chunks follow one another."""

    rows: Tensor
    chunks: Tensor
    saves: Tensor


@dataclass(kw_only=True)
class DraftRuns:
    """StepInputs.runs of a decode step with drafts, and the result of `plan_runs`, both int32."""

    runs_T: Tensor
    fillings_T: Tensor


class TritonGatedDelta(RingedGatedDelta):
    name = "triton"

    def __init__(self, shape: GatedDeltaShape, dtype: torch.dtype):
        assert shape.num_v_heads % shape.num_k_heads == 0, "each k head serves as many v heads as every other"
        assert shape.conv_kernel_size > 1, "a convolution over one token has no state"
        self.shape = shape
        self.dtype = dtype
        self._keys = max(16, triton.next_power_of_2(shape.head_k_dim))
        self._precision = _PRECISIONS[dtype]

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], saves: Sequence[StateSave],
                     device: torch.device) -> ChunkPlan:
        check_saves(query_lens_B, context_lens_B, saves)
        saves_by_row: dict[int, dict[int, int]] = {}
        for save in saves:
            slots = saves_by_row.setdefault(save.row, {})
            assert save.offset not in slots, f"row {save.row} saves twice after {save.offset} tokens"
            slots[save.offset] = save.slot
        rows: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        ends = [(0, 0)]
        first = 0
        for row, (query_len, context_len) in enumerate(zip(query_lens_B, context_lens_B, strict=True)):
            end = first + query_len
            shift = context_len - end
            base = first - (first + shift) % CHUNK_SIZE
            is_fresh = int(context_len == query_len)
            slots = {first + offset: slot for offset, slot in saves_by_row.get(row, {}).items()}
            row_chunks = [(row, first, end, start, is_fresh, slots.get(min(start + CHUNK_SIZE, end), -1), shift, 0)
                          for start in range(base, end, CHUNK_SIZE)]
            rows.append((row, first, end, base, len(chunks), len(row_chunks), is_fresh, len(ends), len(slots), shift,
                         0, 0))
            chunks += row_chunks
            ends += slots.items()
            first = end
        # Longest rows first: the last programs to start are then the shortest.
        rows.sort(key=lambda fields: -fields[5])
        tables = upload_together([np.array(table, dtype=np.int32) for table in (rows, chunks, ends)], device)
        return ChunkPlan(rows=tables[0], chunks=tables[1], saves=tables[2])

    def plan_drafts_in_ring(self, inputs: StepInputs, ring: Ring) -> DraftRuns:
        num_tokens, fillings_T = len(inputs.runs), torch.empty_like(inputs.runs)
        plan_runs[(triton.cdiv(num_tokens, _PLAN.size),)](
            inputs.runs, inputs.state_slots, inputs.context_lens, ring.starts, fillings_T, num_tokens,
            LENGTH=ring.length, SIZE=_PLAN.size, num_warps=_PLAN.num_warps)
        return DraftRuns(runs_T=inputs.runs, fillings_T=fillings_T)

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert x_TC.stride(1) == weight_CW.stride(1) == 1, "channels lie together"
        assert conv_state[0].is_contiguous(), "a state lies together"
        num_tokens, num_channels = x_TC.shape
        width = self.shape.conv_kernel_size
        out_TC = torch.empty((num_tokens, num_channels), dtype=x_TC.dtype, device=x_TC.device)
        strides = (x_TC.stride(0), conv_state.stride(0), num_channels)
        slots_B, sizes = metadata.state_slots_B, {"WIDTH": width, "COLUMNS": conv_state.shape[1]}
        if not metadata.is_prefill:
            runs_T = None if metadata.state_plan is None else metadata.state_plan.runs_T
            kernels.convolve_step[(triton.cdiv(num_channels, _CONVOLVE_STEP.size), num_tokens)](
                x_TC, weight_CW, conv_state, out_TC, slots_B, metadata.context_lens_B,
                slots_B if runs_T is None else runs_T, *strides, CHANNELS=_CONVOLVE_STEP.size, **sizes,
                HAS_RUNS=runs_T is not None, num_warps=_CONVOLVE_STEP.num_warps, **launch_settings(),
            )
            return out_TC
        plan: ChunkPlan = metadata.state_plan
        kernels.convolve_chunks[(len(plan.chunks), triton.cdiv(num_channels, _CONVOLVE_CHUNKS.size))](
            x_TC, weight_CW, conv_state, out_TC, plan.chunks, slots_B, *strides, CHANNELS=_CONVOLVE_CHUNKS.size,
            **sizes, num_warps=_CONVOLVE_CHUNKS.num_warps,
        )
        kernels.store_inputs[(len(plan.rows), triton.cdiv(num_channels, _STORE_INPUTS.size))](
            x_TC, conv_state, plan.rows, plan.saves, slots_B, *strides, CHANNELS=_STORE_INPUTS.size, **sizes,
            TAIL=triton.next_power_of_2(width - 1), num_warps=_STORE_INPUTS.num_warps,
        )
        return out_TC

    def delta_rule(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                   state: Tensor, metadata: AttentionMetadata) -> Tensor:
        out_TVD = self._make_output(qkv_TC, a_TV, b_TV, state)
        if metadata.is_prefill:
            self._chunks(qkv_TC, (a_TV, b_TV, neg_exp_A_V, dt_bias_V), state, out_TVD, metadata)
            return out_TVD
        grid, heads, sizes = self._step_layout(len(qkv_TC))
        kernels.delta_step[grid](
            qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, state, out_TVD, metadata.state_slots_B,
            qkv_TC.stride(0), a_TV.stride(0), b_TV.stride(0), state.stride(0), *heads, **sizes,
            num_warps=_STEP.num_warps,
        )
        return out_TVD

    def step_in_ring(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                     state: Tensor, ring: Ring, metadata: AttentionMetadata) -> Tensor:
        rings = ring.updates, ring.keys, ring.log_decays
        assert all(tensor[0].is_contiguous() for tensor in rings), "a slot's ring lies together"
        out_TVD = self._make_output(qkv_TC, a_TV, b_TV, state)
        grid, heads, sizes = self._step_layout(len(qkv_TC))
        given = (qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, state, *rings)
        rows = out_TVD, metadata.state_slots_B, metadata.context_lens_B
        strides = qkv_TC.stride(0), a_TV.stride(0), b_TV.stride(0), state.stride(0)
        sizes |= {"PLACES": ring.num_places, "TOKENS": tokens_in_mma(ring.length), "PRECISION": self._precision}
        plan: DraftRuns | None = metadata.state_plan
        if plan is None:
            delta_step_in_ring[grid](*given, ring.starts, *rows, *strides, *heads, **sizes, LENGTH=ring.length,
                                     num_warps=_STEP.num_warps, **launch_settings())
        else:
            delta_run_in_ring[grid](*given, *rows, plan.runs_T, plan.fillings_T, *strides, *heads, **sizes,
                                    num_warps=_STEP.num_warps)
        return out_TVD

    def _make_output(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, state: Tensor) -> Tensor:
        """(T, Nv, Dv), not filled; checks the layout of the inputs."""
        assert qkv_TC.stride(1) == a_TV.stride(1) == b_TV.stride(1) == 1, "heads lie together"
        assert state[0].is_contiguous(), "a state lies together"
        return torch.empty((qkv_TC.shape[0], self.shape.num_v_heads, self.shape.head_v_dim), dtype=qkv_TC.dtype,
                           device=qkv_TC.device)

    def _step_layout(self, batch_size: int) -> tuple[tuple[int, int, int], tuple[int, int, int, int], dict[str, Any]]:
        """The grid of a step, the numbers and dims of heads, and the constants of kernels."""
        shape, values = self.shape, self._values(_STEP.size)
        sizes = {"SCALE": shape.head_k_dim**-0.5, "VALUES": values, "KEYS": self._keys,
                 "IS_WHOLE": shape.head_k_dim == self._keys and shape.head_v_dim % values == 0}
        return ((triton.cdiv(shape.head_v_dim, values), shape.num_v_heads, batch_size),
                (shape.num_k_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim), sizes)

    def _chunks(self, qkv_TC: Tensor, gates: tuple[Tensor, Tensor, Tensor, Tensor], state: Tensor, out_TVD: Tensor,
                metadata: AttentionMetadata) -> None:
        shape, plan = self.shape, metadata.state_plan
        squares = (len(plan.chunks), shape.num_v_heads, CHUNK_SIZE, CHUNK_SIZE)
        system = qkv_TC.new_empty(squares, dtype=torch.float32)
        # The inverse has as many bytes and overwrites it.
        inverse = system.view(torch.bfloat16) if self._precision == "split" else system
        scores = torch.empty_like(inverse)
        coefficients = qkv_TC.new_empty((*squares[:2], kernels.COEFFICIENTS.value, CHUNK_SIZE), dtype=torch.float32)
        a_TV, b_TV = gates[:2]
        heads = (shape.num_k_heads, shape.num_v_heads, shape.head_k_dim)
        kernels.chunk_matrices[squares[:2]](
            qkv_TC, *gates, plan.chunks, system, scores, coefficients, qkv_TC.stride(0), a_TV.stride(0),
            b_TV.stride(0), *heads, SCALE=shape.head_k_dim**-0.5, KEYS=self._keys, PRECISION=self._precision,
            num_warps=_CHUNK_MATRICES.num_warps,
        )
        kernels.invert_system[(squares[0] * squares[1],)](system, inverse, PRECISION=self._precision,
                                                          num_warps=_INVERT.num_warps)
        values = self._values(_SCAN.size)
        kernels.chunk_scan[(triton.cdiv(shape.head_v_dim, values), shape.num_v_heads, len(plan.rows))](
            qkv_TC, inverse, scores, coefficients, plan.rows, plan.chunks, state, out_TVD, metadata.state_slots_B,
            qkv_TC.stride(0), state.stride(0), *heads, shape.head_v_dim, VALUES=values, KEYS=self._keys,
            PRECISION=self._precision, num_warps=_SCAN.num_warps, num_stages=_SCAN.num_stages,
        )

    def _values(self, most: int) -> int:
        return min(most, max(16, triton.next_power_of_2(self.shape.head_v_dim)))
