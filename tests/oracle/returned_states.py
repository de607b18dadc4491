"""Compares hidden states of layers with those of transformers. Shared by the tests of what returns them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from npu_runner.request.outputs import RequestOutput
from tests.oracle import reference

LAYERS = (1, -1, 0)
TOLERANCE = 1e-4
RELATIVE = 1e-5
"""Beside it: states are as large as 20, and transformers' own float32 is up to 1.3e-5 of a logit away from its float64.
"""


@torch.inference_mode()
def expected(path: Path, token_ids: Sequence[int], images: Sequence[Image.Image] = ()) -> tuple[torch.Tensor, ...]:
    """transformers' hidden states by layer, (T, D) each."""
    inputs = reference.model_inputs(path, token_ids, images)
    output = reference.load_model(path)(**inputs, output_hidden_states=True)
    return tuple(states[0] for states in output.hidden_states)


def assert_states(path: Path, prompt: Sequence[int], result: RequestOutput, layers: Sequence[int] = LAYERS,
                  images: Sequence[Image.Image] = ()) -> None:
    assert result.error is None
    assert result.hidden_states is not None
    assert list(result.hidden_states) == list(layers)
    wanted = expected(path, [*prompt, *result.token_ids][:-1], images)
    for layer, states in result.hidden_states.items():
        assert states.dtype == np.float32
        np.testing.assert_allclose(states, wanted[layer].numpy(), rtol=RELATIVE, atol=TOLERANCE,
                                   err_msg=f"layer {layer}")
