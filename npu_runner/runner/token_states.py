"""Final hidden states of all tokens of a step's chunks, on their way to the host. Knows nothing of requests or models.

They travel as they are, in the model's dtype, and become float32 on the host: exact, and the device takes no memory for
them beside the step's own. So a prompt of any length takes what a step takes.

T tokens in the step, L of them in a chunk, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import PromptStates
from npu_runner.platforms.transfers import Download


@dataclass(frozen=True)
class TokenStates:
    """One download for each of `chunks`: bits of the states, int16 (L, D) or int32 (L, D), of values of `dtype`."""

    chunks: Sequence[PromptStates]
    downloads: Sequence[Download]
    dtype: torch.dtype

    def is_done(self) -> bool:
        return all(download.is_done() for download in self.downloads)

    def to_host(self) -> list[tuple[int, int, np.ndarray]]:
        """See ModelRunnerOutput.prompt_states; waits for the step."""
        return [(chunk.row, chunk.place, as_float32(download.wait(), self.dtype))
                for chunk, download in zip(self.chunks, self.downloads, strict=True)]


def send_states(chunks: Sequence[PromptStates], hidden_TD: Tensor,
                download: Callable[[Tensor], Download]) -> TokenStates:
    """Hand out the copies of the states that `chunks` name."""
    bits_TD = hidden_TD.contiguous().view(_bits_of(hidden_TD.dtype))
    downloads = [download(bits_TD[chunk.first_token : chunk.first_token + chunk.num_tokens]) for chunk in chunks]
    return TokenStates(chunks, downloads, hidden_TD.dtype)


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    """Numpy has no bfloat16: values cross as integers of their size."""
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def as_float32(bits_LD: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of bits, float32 (L, D), a copy. `dtype`: float32, float16 or bfloat16; each value of the latter two
    is one of float32."""
    if dtype == torch.bfloat16:  # the upper half of a float32
        return (bits_LD.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits_LD.view(np.float32 if dtype == torch.float32 else np.float16).astype(np.float32)
