"""Gated DeltaNet over rows whose branches share one prefix: what transformers computes for each branch alone, at once.

A row is a prefix of P tokens, padded in front, then G branches of L tokens each, padded behind. The convolution and the
recurrence of every branch go on from where the prefix ends. `use_branches()` puts the two functions in the place of
those that transformers' layers call, for training only: the layers and their weights stay transformers' own. Formulas:
arXiv 2412.06464, section 3.3 (the chunk form with gates).

B rows, N of whatever is computed at once, T = P + G L tokens, C channels, H heads, K and V their key and value dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def use_branches() -> None:
    """From now on transformers' Qwen3.5 layers take rows of branches, where a forward says so with `branch_grid`."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    theirs.causal_conv1d_fn = branched_convolution
    theirs.torch_chunk_gated_delta_rule = branched_delta_rule


def branched_convolution(x_BCT: Tensor, weight_CW: Tensor, bias: None = None, *, activation: str, branch_grid: Tensor,
                         valid_BT: Tensor, **_: Any) -> Tensor:
    """silu of the causal depthwise convolution. `branch_grid` is (G, L); padding (`valid_BT` 0) counts as 0."""
    assert activation == "silu", activation
    num_branches, length = branch_grid.shape
    x_BCT = x_BCT * valid_BT[:, None].to(x_BCT.dtype)
    num_prefix = x_BCT.shape[-1] - num_branches * length
    prefix, branches = x_BCT[..., :num_prefix], x_BCT[..., num_prefix:].unflatten(-1, (num_branches, length))
    before = weight_CW.shape[-1] - 1
    tail = prefix[..., None, num_prefix - before :].expand(-1, -1, num_branches, -1)
    of_prefix = _convolve(F.pad(prefix, (before, 0)), weight_CW, num_prefix)
    of_branches = _convolve(torch.cat((tail, branches), dim=-1), weight_CW[:, None], length)
    return F.silu(torch.cat((of_prefix, of_branches.flatten(-2)), dim=-1))


def _convolve(padded: Tensor, weight: Tensor, length: int) -> Tensor:
    return sum((padded[..., tap : tap + length] * weight[..., tap, None] for tap in range(weight.shape[-1])),
               start=torch.zeros((), device=padded.device, dtype=padded.dtype))


def branched_delta_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, branch_grid: Tensor,
                        valid_BT: Tensor, **_: Any) -> tuple[Tensor, None]:
    """(B, T, H, V) of query, key (B, T, heads, K), value (B, T, H, V), g and beta (B, T, H).

    In float32 whatever surrounds it: autocast would make bfloat16 of its products, which a state does not forgive.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _branched(query, key, value, g, beta, branch_grid, valid_BT).to(query.dtype), None


def _branched(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, branch_grid: Tensor,
              valid_BT: Tensor) -> Tensor:
    num_branches, length = branch_grid.shape
    times = value.shape[2] // query.shape[2]
    q, k = (_normalised(x.float()).repeat_interleave(times, dim=2) for x in (query, key))
    valid_BT1 = valid_BT[..., None].float()
    parts = (q * query.shape[-1] ** -0.5, k, value.float(), g.float() * valid_BT1, beta.float() * valid_BT1)
    num_prefix = query.shape[1] - num_branches * length
    prefix = [x[:, :num_prefix] for x in parts]
    branches = [x[:, num_prefix:].unflatten(1, (num_branches, length)).flatten(0, 1) for x in parts]
    zero = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], value.shape[-1])
    of_prefix, state = _in_chunks(prefix, zero, CHUNK)
    of_branches, _ = _in_chunks(branches, state.repeat_interleave(num_branches, dim=0), length)
    of_branches = of_branches.unflatten(0, (-1, num_branches)).flatten(1, 2)
    return torch.cat((of_prefix, of_branches), dim=1)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _in_chunks(parts: Sequence[Tensor], state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The recurrence over q, k, v, g, beta (N, tokens, H, ...), chunk by chunk from `state` (N, H, K, V); float32."""
    outputs = []
    for first in range(0, parts[0].shape[1], size):
        rows = slice(first, first + size)
        q, k, v, g, beta = (x[:, rows].transpose(1, 2) for x in parts)
        output, state = _one_chunk(q, k, v, g, beta, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _one_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of (N, H, tokens, ...)."""
    summed = g.cumsum(-1)
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    # Masked before exp: above the diagonal it would overflow.
    decay = (summed[..., :, None] - summed[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (beta[..., None] * k @ k.transpose(-1, -2)) * decay
    system = system.tril(-1) + torch.eye(size, device=g.device)
    right = torch.cat((beta[..., None] * v, (beta * summed.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, weights = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    new = new - weights @ state
    output = (q * summed.exp()[..., None]) @ state + ((q @ k.transpose(-1, -2)) * decay) @ new
    last = summed[..., -1:]
    kept = k * (last - summed).exp()[..., None]
    return output, state * last[..., None].exp() + kept.transpose(-1, -2) @ new
