"""Mixtures of experts whose products round their inputs, in float64: the references of int8 and FP8, expert by expert.

T tokens, K experts a token, E experts, D hidden size, I width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.oracle.fp8_reference import fp8_product
from tests.oracle.int8_reference import rounded_product

Weight = tuple[Tensor, Tensor]
"""Values (E, O, I) in int8 or FP8, and scales (E, O) or of blocks of 128 x 128."""


def mixture(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Weight, down: Weight, first: int = 0
            ) -> Tensor:
    """float64 (T, D): of each token the sum of weight * down(silu(gate) * up), by the experts that are given. They are
    those from `first` on."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    product = rounded_product if gate_up[0].dtype == torch.int8 else fp8_product
    for place in range(len(gate_up[0])):
        tokens, choices = (experts_TK == first + place).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = product(x_TD[tokens].double(), gate_up[0][place], gate_up[1][place], None).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            found = product(hidden, down[0][place], down[1][place], None)
            out_TD.index_add_(0, tokens, found * weights_TK[tokens, choices].double()[:, None])
    return out_TD
