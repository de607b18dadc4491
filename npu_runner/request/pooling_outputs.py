"""What `LLM.encode` gives back, under vLLM's names. Plain data; knows nothing of models or of how it came about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npu_runner.errors import RequestError
from npu_runner.request.outputs import RequestOutput


@dataclass(frozen=True)
class PoolingOutput:
    """`data`: float32, (T, D) for token_embed, a row for each token of the prompt; (D,) for embed."""

    data: np.ndarray


@dataclass(frozen=True)
class PoolingRequestOutput:
    """What was asked for of one prompt. `outputs` is None where there is an `error`."""

    request_id: str
    outputs: PoolingOutput | None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache; 0 for token_embed, which computes all."""
    error: str | None = None
    error_code: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> PoolingRequestOutput:
        """Of a request for one prompt."""
        (pooled,) = output.completions
        outputs = None if pooled.pooled is None else PoolingOutput(pooled.pooled)
        return cls(output.request_id, outputs, output.num_prompt_tokens, output.num_cached_tokens, pooled.error,
                   pooled.error_code)

    @property
    def data(self) -> np.ndarray:
        """The array. Raises RequestError with the reason where there is none."""
        if self.outputs is None:
            raise RequestError(self.error or "there is no array", self.error_code or "no_vector")
        return self.outputs.data
