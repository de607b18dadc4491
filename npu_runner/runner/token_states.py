"""Hidden states of a step's tokens on their way to the host. Knows nothing of requests or of layers.

States are sent as they are, in the model's dtype, and become float32 on the host: exact, and the device takes no memory
for them beside the step's own. So a prompt of any length takes what a step takes.

T tokens in the step, L of them in a chunk, D numbers of a token: the hidden size, once for each layer.
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
    """One download for each run of chunks that lie side by side: bits of the states, int16 or int32 (L, D), of values
    of `dtype`."""

    runs: Sequence[Sequence[PromptStates]]
    downloads: Sequence[Download]
    dtype: torch.dtype

    def is_done(self) -> bool:
        return all(download.is_done() for download in self.downloads)

    def to_host(self) -> list[tuple[int, int, np.ndarray]]:
        """See ModelRunnerOutput.prompt_states; waits for the step."""
        found = []
        for run, download in zip(self.runs, self.downloads, strict=True):
            states_LD = as_float32(download.wait(), self.dtype)
            for chunk in run:
                first = chunk.first_token - run[0].first_token
                found.append((chunk.row, chunk.place, states_LD[first : first + chunk.num_tokens]))
        return found


def send_states(chunks: Sequence[PromptStates], hidden_TD: Tensor,
                download: Callable[[Tensor], Download]) -> TokenStates:
    """Hand out the copies of the states that `chunks` name, which are in the order of their tokens."""
    # Numpy has no bfloat16: values cross as integers of their size.
    bits_TD = hidden_TD.view(torch.int32 if hidden_TD.itemsize == 4 else torch.int16)
    runs: list[list[PromptStates]] = []
    for chunk in chunks:
        if runs and runs[-1][-1].first_token + runs[-1][-1].num_tokens == chunk.first_token:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    downloads = [download(bits_TD[run[0].first_token : run[-1].first_token + run[-1].num_tokens].contiguous())
                 for run in runs]
    return TokenStates(runs, downloads, hidden_TD.dtype)


def as_float32(bits_LD: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of bits, float32 (L, D), a copy. `dtype`: float32, float16 or bfloat16; each value of the latter two
    is one of float32."""
    if dtype == torch.bfloat16:  # the upper half of a float32
        return (bits_LD.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits_LD.view(np.float32 if dtype == torch.float32 else np.float16).astype(np.float32)
