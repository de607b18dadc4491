"""Steps of a model that pools: a few numbers of a prompt's last hidden state in the place of a next token. Prefills
alone.

The numbers are a vector, which is cut and normalised here, or what the network's pooling head makes of the state. They
are brought to the host in float32, whatever the model's dtype, behind the forward and in one copy. Every rank has the
whole hidden state, so the first one pools and the others have nothing to do.

B rows of the step whose prompt ends in it, T tokens in the step, D hidden size, W numbers of a row (a vector's D).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.checkpoint.model_config import PoolingConfig, VectorPooling
from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.transfers import Download
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.step import PreparedStep, StepRunner, StepUnderWay
from npu_runner.runner.token_results import TokenStates, send_states

_SMALLEST_LENGTH = 1e-12  # as torch.nn.functional.normalize has it


@dataclass(frozen=True)
class PooledValues:
    """A step's numbers on their way to the host: int32 (B, 1 + W), the step's number and the bits of the values.

    `widths_B`: how many of a row's values were asked for.
    """

    flat: Download
    widths_B: np.ndarray

    def is_done(self) -> bool:
        return self.flat.is_done()

    def to_host(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """(the step's number, values) of the rows, float32 the latter; waits for the step."""
        records = self.flat.wait()
        values_BW = np.ascontiguousarray(records[:, 1:]).view(np.float32)
        # Copies: one row must not keep the whole step's alive.
        return records[:, 0], [values[:width].copy() for values, width in zip(values_BW, self.widths_B, strict=True)]


class PoolingStepRunner(StepRunner):
    """A StepRunner that pools and does not sample."""

    of_rows = MappingProxyType({"dimensions": np.int32})

    def __init__(self, *arguments: Any, pooling: PoolingConfig, hidden_size: int, **settings: Any):
        super().__init__(*arguments, sampler=None, **settings)
        self.pooling = pooling
        self.num_values = pooling.num_values(hidden_size)

    def admit(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """`dimensions`, (B,) int32: how many numbers each row is to have."""
        asked = [None if entry.pooling is None else entry.pooling.dimensions for entry in batch.new_sampling]
        return {"dimensions": np.array([width or self.num_values for width in asked], dtype=np.int32)}

    def read_out(self, hidden_BD: Tensor) -> Tensor:
        """The head's output for the hidden states (B, W); without a head, the hidden states."""
        return self.model.compute_logits(hidden_BD) if self.pooling.has_head else hidden_BD

    def prompt_results(self, step: PreparedStep, hidden_TD: Tensor) -> TokenStates | None:
        """Send hidden states of all tokens of a chunk to the host, where they are wanted."""
        if self.tp.rank != 0 or not step.batch.prompt_states:
            return None
        return send_states(step.batch.prompt_states, hidden_TD, self.platform.memory.download)

    def make_result(self, step: PreparedStep, values_BW: Tensor,
                    of_rows: dict[str, np.ndarray]) -> PooledValues | None:
        """Hand out the pooling; None where this rank, or this step, pools nothing."""
        widths_B = of_rows["dimensions"]
        if self.tp.rank != 0 or not len(widths_B):
            return None
        values_BW = values_BW.float()
        if isinstance(self.pooling, VectorPooling):
            if bool((widths_B < self.num_values).any()):
                values_BW = cut(values_BW, step.tensors["dimensions"])
            values_BW = normalised(values_BW) if self.pooling.is_normalised else values_BW
        records = torch.cat([step.tensors["receipts"][:, None], values_BW.contiguous().view(torch.int32)], dim=1)
        return PooledValues(self.platform.memory.download(records), widths_B.astype(np.int64))

    def _output(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        step, pooled = under_way.step, under_way.sampled
        if self.tp.rank != 0:
            return None
        batch = step.batch
        states = under_way.of_prompts.to_host() if under_way.of_prompts is not None else []
        found: dict[int, np.ndarray] = {}
        if pooled is not None:
            receipts_B, on_host = pooled.to_host()
            self.check_receipts(step, receipts_B)
            found = dict(zip(np.flatnonzero(batch.samples_B).tolist(), on_host, strict=True))
        return ModelRunnerOutput([[] for _ in range(batch.batch_size)], pooled=found, prompt_states=states)


def cut(x_BD: Tensor, dimensions_B: Tensor) -> Tensor:
    """Zeros behind the first `dimensions_B` (int32) values of each row."""
    columns_D = torch.arange(x_BD.shape[1], dtype=torch.int32, device=x_BD.device)
    return x_BD * (columns_D < dimensions_B[:, None]).float()


def normalised(x_BD: Tensor) -> Tensor:
    """Each row divided by its length."""
    return x_BD / (x_BD * x_BD).sum(dim=1, keepdim=True).sqrt().clamp(min=_SMALLEST_LENGTH)
