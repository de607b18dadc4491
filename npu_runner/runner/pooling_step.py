"""Steps of a model that gives vectors: the last token's hidden state in the place of a next token. Prefills alone.

Cut, normalised and brought to the host in float32, whatever the model's dtype, behind the forward and in one copy.
Every rank has the whole hidden state, so the first one pools and the others have nothing to do.

B rows of the step whose prompt ends in it, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.checkpoint.model_config import PoolingConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.transfers import Download
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.step import PreparedStep, StepRunner, StepUnderWay
from npu_runner.runner.token_states import TokenStates, send_states

_SMALLEST_LENGTH = 1e-12  # as torch.nn.functional.normalize has it


@dataclass(frozen=True)
class PooledVectors:
    """A step's vectors on their way to the host: int32 (B, 1 + D), the step's number and the bits of the values.

    `dimensions_B`: how many of a row's values were asked for.
    """

    flat: Download
    dimensions_B: np.ndarray

    def is_done(self) -> bool:
        return self.flat.is_done()

    def to_host(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """(numbers of the step, vectors) of the rows, float32 the latter; waits for the step."""
        records = self.flat.wait()
        values_BD = np.ascontiguousarray(records[:, 1:]).view(np.float32)
        lengths = self.dimensions_B.tolist()
        # Copies: one vector must not keep the whole step's alive.
        return records[:, 0], [values[:length].copy() for values, length in zip(values_BD, lengths, strict=True)]


class PoolingStepRunner(StepRunner):
    """A StepRunner that pools and does not sample. `hidden_size`: numbers of a whole vector."""

    def __init__(self, *arguments: Any, pooling: PoolingConfig, hidden_size: int, **settings: Any):
        super().__init__(*arguments, sampler=None, **settings)
        self.pooling = pooling
        self.hidden_size = hidden_size

    def admit(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """`dimensions`, (B,) float32: how many numbers each row's vector is to have."""
        asked = [None if entry.pooling is None else entry.pooling.dimensions for entry in batch.new_sampling]
        return {"dimensions": np.array([width or self.hidden_size for width in asked], dtype=np.float32)}

    def read_out(self, hidden_BD: Tensor) -> Tensor:
        """The hidden states, as they are."""
        return hidden_BD

    def look_at_prompts(self, step: PreparedStep, hidden_TD: Tensor) -> TokenStates | None:
        """Send hidden states of all tokens of a chunk to the host, where they are wanted."""
        if self.tp.rank != 0 or not step.batch.prompt_states:
            return None
        return send_states(step.batch.prompt_states, hidden_TD, self.platform.memory.download)

    def make_result(self, step: PreparedStep, hidden_BD: Tensor,
                    of_rows: dict[str, np.ndarray]) -> PooledVectors | None:
        """Hand out the pooling; None where this rank, or this step, pools nothing."""
        dimensions_B = of_rows["dimensions"]
        if self.tp.rank != 0 or not len(dimensions_B):
            return None
        x_BD = hidden_BD.float()
        if (dimensions_B < self.hidden_size).any():
            x_BD = cut(x_BD, step.tensors["dimensions"])
        if self.pooling.is_normalised:
            x_BD = normalised(x_BD)
        records = torch.cat([step.tensors["receipts"][:, None], x_BD.contiguous().view(torch.int32)], dim=1)
        return PooledVectors(self.platform.memory.download(records), dimensions_B.astype(np.int64))

    def _output(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        step, vectors = under_way.step, under_way.sampled
        if self.tp.rank != 0:
            return None
        batch = step.batch
        states = under_way.of_prompts.to_host() if under_way.of_prompts is not None else []
        found: dict[int, np.ndarray] = {}
        if vectors is not None:
            receipts_B, on_host = vectors.to_host()
            self.check_receipts(step, receipts_B)
            found = dict(zip(np.flatnonzero(batch.samples_B).tolist(), on_host, strict=True))
        return ModelRunnerOutput([[] for _ in range(batch.batch_size)], vectors=found, prompt_states=states)


def cut(x_BD: Tensor, dimensions_B: Tensor) -> Tensor:
    """Zeros behind the first `dimensions_B` (float32) values of each row."""
    columns_D = torch.arange(x_BD.shape[1], dtype=torch.float32, device=x_BD.device)
    return x_BD * (columns_D < dimensions_B[:, None]).float()


def normalised(x_BD: Tensor) -> Tensor:
    """Each row divided by its length."""
    return x_BD / (x_BD * x_BD).sum(dim=1, keepdim=True).sqrt().clamp(min=_SMALLEST_LENGTH)
