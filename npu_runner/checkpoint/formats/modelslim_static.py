"""ModelSlim's W8A8 with static inputs: what its weights and biases are without the scale and the offset of inputs.

The product is (q W^T + quant_bias) * deq_scale with q = round(x / input_scale + input_offset). So the weight is W *
deq_scale / input_scale, and the bias (quant_bias + input_offset * sum_k W) * deq_scale. A float bias beside it is
already in there. Knows no names of modules.

N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_runner.checkpoint.formats.stored import FloatTensor, Matrix, QuantisedMatrix, Span, StoredMatrix
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import WeightsError

_ROWS_AT_ONCE = 256
_ROUNDING = 1.0
"""quant_bias is rounded to an integer."""


def deq_scale(reader: CheckpointReader, name: str) -> Tensor:
    """(N,) float64. For float16 models the file has int64 with the bits of a float32 in the low half."""
    stored_N = reader.read(name).flatten()
    if stored_N.dtype == torch.int64:
        stored_N = stored_N.contiguous().view(torch.int32)[::2].contiguous().view(torch.float32)
    return stored_N.double()


class StaticScale(Matrix):
    """(N, 1) float32: deq_scale / input_scale."""

    def __init__(self, reader: CheckpointReader, deq_scale_name: str, input_scale_name: str, num_outputs: int):
        self._reader, self._names, self.shape = reader, (deq_scale_name, input_scale_name), (num_outputs, 1)

    def read(self, rows: Span, columns: Span) -> Tensor:
        input_scale = self._reader.read(self._names[1]).double().item()
        if not input_scale > 0:
            raise WeightsError(f"{self._names[1]} is {input_scale}, a scale of inputs is above 0; copy the checkpoint "
                               "again from its source")
        scale_N = deq_scale(self._reader, self._names[0]) / input_scale
        return scale_N[rows[0]: rows[0] + rows[1], None].float()


class StaticBias(FloatTensor):
    """(N,): the bias without the part that corrects for the offset of inputs."""

    form = ""

    def __init__(self, reader: CheckpointReader, values: StoredMatrix, quant_bias: str, deq_scale_name: str,
                 input_offset: str):
        self._reader, self._values = reader, values
        self.quant_bias, self._deq_scale, self._input_offset = quant_bias, deq_scale_name, input_offset
        self.shape = (values.shape[0],)

    def read(self, spans: Sequence[Span]) -> Tensor:
        (start, length), = spans
        scale_N = deq_scale(self._reader, self._deq_scale)[start: start + length]
        return (self.units((start, length)) * scale_N).float()

    def units(self, rows: Span) -> Tensor:
        """float64, in units of deq_scale."""
        start, length = rows
        offset = self._reader.read(self._input_offset).double().item()
        sums = [self._values.read((first, min(_ROWS_AT_ONCE, start + length - first)), (0, self._values.shape[1])
                                  ).sum(1, dtype=torch.int64) for first in range(start, start + length, _ROWS_AT_ONCE)]
        quant_bias_N = self._reader.read(self.quant_bias)[start: start + length].double()
        return quant_bias_N + offset * torch.cat(sums).double()


@dataclass(frozen=True)
class StaticMatrix(QuantisedMatrix):
    """`must_be_empty`: the bias of a linear that has none; what stands in it would be lost."""

    must_be_empty: StaticBias | None = None

    def read(self, spans: Sequence[Span]) -> Tensor:
        self._check_bias(*spans)
        return super().read(spans)

    def read_rows(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        self._check_bias(rows, columns)
        return super().read_rows(rows, columns)

    def _check_bias(self, rows: Span, columns: Span) -> None:
        if self.must_be_empty is not None and columns == (0, self.values.shape[1]):
            most = float(self.must_be_empty.units(rows).abs().max())
            if most > _ROUNDING:
                raise WeightsError(f"{self.must_be_empty.quant_bias} holds a bias of {most:.0f} units beside the "
                                   "offset of inputs, and the file has no bias for this linear: a shift of the norm "
                                   "before it, which is not supported")
