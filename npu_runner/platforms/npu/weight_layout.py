"""The memory layout of quantised weights: NZ (FRACTAL_NZ, blocks as the matrix unit reads them) where the operators
accept it, else row by row (ND). Each weight is converted once, after loading.

docs/quantization.md says which operator takes what, and by which document. O outputs, I inputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from npu_runner.errors import ModelError

NZ = 29
_ROWS, _BLOCK_BYTES = 16, 32
"""A block has 16 inputs and 32 bytes of outputs."""
_LEAST_OF_FUSED, _MOST_OF_FUSED = 128, 10240
"""Outputs of gate and up together for which npu_grouped_matmul_swiglu_quant_v2 is right. With fewer its kernel writes
over the scales of its rows and says nothing."""
_GROUPS, _OUTPUTS_OF_GROUPS = (64, 128), 64


@dataclass(frozen=True)
class WeightLayout:
    """Read `NpuSettings.nz_weights` when operators are made: a traced step reads no environment. `can_fuse_experts`
    False: the fused matmul computes otherwise here."""

    nz_weights: str
    can_fuse_experts: bool = True

    def linear_weight(self, values_OI: Tensor) -> Tensor:
        """int8 as `matmul_view` hands it on: (I, O) where weights are laid out, else as it is."""
        return values_OI if self.nz_weights == "none" else _moved(values_OI.t().contiguous())

    def matmul_view(self, values: Tensor) -> Tensor:
        """(I, O) of a `linear_weight`. The matmul recognises the transposed view of one that is not in NZ.
        """
        return values.t() if self.nz_weights == "none" else values

    def expert_weights(self, gate_up_EIO: Tensor, down_EIO: Tensor) -> tuple[Tensor, Tensor]:
        """int8, contiguous. In NZ gate_up is for the fused matmul alone; down's matmul accepts both."""
        is_fused = self.fuses_experts(gate_up_EIO.shape[1], gate_up_EIO.shape[2])
        return (_moved(gate_up_EIO) if is_fused else gate_up_EIO,
                down_EIO if self.nz_weights == "none" else _moved(down_EIO))

    def fuses_experts(self, num_inputs: int, num_outputs: int) -> bool:
        """Whether one operator multiplies with gate and up, applies silu and rounds: it wants NZ."""
        return (self.can_fuse_experts and self.nz_weights != "none" and _LEAST_OF_FUSED <= num_outputs <= _MOST_OF_FUSED
                and _has_whole_blocks(num_inputs, num_outputs))

    @property
    def turns_rows(self) -> bool:
        """Whether int8 with inputs in 16 bits and a scale for each output is (I, O), and not (O, I)."""
        return self.nz_weights == "all"

    def weight_alone(self, values_IO: Tensor, group_size: int) -> Tensor:
        """int8 with inputs in 16 bits (`group_size` 0: a scale for each output)."""
        return _moved(values_IO) if group_size == 0 and self.turns_rows else values_IO

    def accepts_words(self, num_inputs: int, num_outputs: int, group_size: int) -> bool:
        """Whether `packed_words` is for four bits of this shape."""
        return (self.nz_weights == "all" and group_size in _GROUPS and num_inputs % group_size == 0
                and num_outputs % _OUTPUTS_OF_GROUPS == 0)


def packed_words(values_IO: Tensor) -> Tensor:
    """int32 (I, O / 8) in NZ of int8 from -8 to 7. The vendor packs what lies in NZ as int32, on the host."""
    return _as_nz(torch_npu.npu_convert_weight_to_int4pack(_cast(values_IO.int())))


def _moved(values: Tensor) -> Tensor:
    """In NZ where nothing has to be padded, so that its bytes stay as many; else as it is."""
    return _as_nz(_cast(values)) if _has_whole_blocks(values.shape[-2], values.shape[-1]) else values


def _has_whole_blocks(num_inputs: int, num_outputs: int) -> bool:
    return num_inputs % _ROWS == 0 and num_outputs % _BLOCK_BYTES == 0


def _cast(values: Tensor) -> Tensor:
    # The switch holds for every tensor made meanwhile, so it is set for this one only.
    torch.npu.config.allow_internal_format = True
    try:
        return torch_npu.npu_format_cast(values, NZ)
    finally:
        torch.npu.config.allow_internal_format = False


def _as_nz(values: Tensor) -> Tensor:
    """Raises ModelError where torch_npu left it as it was, or moved more than it: of a view it moves the whole tensor.
    Matmuls that were chosen for NZ would read other numbers."""
    found, size = torch_npu.get_npu_format(values), torch_npu.get_storage_size(values)
    if found != NZ or size != values.numel():
        raise ModelError(f"torch_npu laid weights of shape {list(values.shape)} out in format {found} with {size} "
                         f"numbers, and not in NZ with {values.numel()}; set NPU_RUNNER_ASCEND_NZ_WEIGHTS=none")
    return values
