"""The algebra of the gated delta rule over chunks of tokens, in plain torch. Knows no plan, no slots and no model.

Within a chunk the recurrence is a triangular system, solved for all chunks at once; between chunks only the state is
carried (arXiv 2412.06464, section 3.3).

N chunks, Nk and Nv key and value heads, G = Nv / Nk, S places of a chunk, K and V the heads' dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Inverses of blocks of 8 are exact to a few parts in 10^7 when keys are alike; of 32, to 10^-4; of 64, wrong.
_BLOCK = 8


@dataclass(frozen=True)
class ChunkParts:
    """What a chunk needs beside the state that enters it.

    q, k (N, Nk, S, K). values (N, Nv, S, V): what each place would write to an empty state; reads (N, Nv, S, K): what
    of an entering state it takes away from that. weights (N, Nv, S, S): what each place reads of those before it.
    from_start (N, Nv, S): how much of the entering state is left at each place; to_end: of each place, at the end.
    """

    q: Tensor
    k: Tensor
    values: Tensor
    reads: Tensor
    weights: Tensor
    from_start: Tensor
    to_end: Tensor

    def of(self, chunks: slice) -> ChunkParts:
        return ChunkParts(self.q[chunks], self.k[chunks], self.values[chunks], self.reads[chunks],
                          self.weights[chunks], self.from_start[chunks], self.to_end[chunks])

    def run(self, states: Tensor) -> Tensor:
        """The outputs (N, Nv, S, V) of chunks that `states` (N, Nv, V, K) enter; these are what leaves them, then."""
        num_k_heads = self.q.shape[1]
        by_k_head = states.unflatten(1, (num_k_heads, -1)).flatten(2, 3)  # (N, Nk, G V, K)
        written = _add_product(self.values, self.reads, states.mT, alpha=-1)
        old = (self.q @ by_k_head.mT).unflatten(-1, (-1, states.shape[2])).transpose(2, 3).flatten(1, 2)
        out = _add_product(self.from_start[..., None] * old, self.weights, written)
        kept = (written * self.to_end[..., None]).mT  # (N, Nv, V, S)
        kept = kept.unflatten(1, (num_k_heads, -1)).flatten(2, 3) @ self.k
        states.mul_(self.from_start[..., -1, None, None]).add_(kept.view(states.shape))
        return out


def chunk_parts(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> ChunkParts:
    """q, k (N, Nk, S, K) normalised and scaled, v (N, Nv, S, V), beta and g (N, Nv, S); float32, zeros in padding."""
    num_k_heads, size = q.shape[1], q.shape[2]
    decay = _decay(g)
    from_start = g.cumsum(-1).exp()
    by_k_head = decay.unflatten(1, (num_k_heads, -1))
    weights = ((q @ k.mT)[:, :, None] * by_k_head).flatten(1, 2)
    system = ((k @ k.mT)[:, :, None] * by_k_head).flatten(1, 2).mul_(beta[..., None]).tril_(-1)
    inverse = invert_unit_lower(system)
    values = (inverse * beta[..., None, :]) @ v
    scaled = (inverse * (beta * from_start)[..., None, :]).unflatten(1, (num_k_heads, -1)).flatten(2, 3)
    reads = (scaled @ k).unflatten(2, (-1, size)).flatten(1, 2)
    return ChunkParts(q, k, values, reads, weights, from_start, decay[..., -1, :])


def _add_product(x: Tensor, a: Tensor, b: Tensor, alpha: int = 1) -> Tensor:
    """x + alpha * (a @ b), in one pass."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), alpha=alpha).view(x.shape)


def _decay(g: Tensor) -> Tensor:
    """exp(g_j+1 + ... + g_i) for j <= i, else 0: (N, Nv, S, S).

    The sums are added up for each j anew: as differences of sums from the start they would have the error of the
    largest, which matters behind a gate that forgets all. Masked before it is exponentiated.
    """
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    sums = torch.where(lower.tril(-1), g[..., None], 0.0).cumsum(-2)
    return torch.where(lower, sums, -torch.inf).exp_()


def invert_unit_lower(system: Tensor) -> Tensor:
    """(I + system)^-1 of strictly lower triangular (..., S, S), S a power of two times 8.

    Blocks of 8 by their powers, which end: (I - L)(I + L^2)(I + L^4); then two neighbours at a time.
    """
    low = _diagonal_blocks(system, _BLOCK)
    eye = torch.eye(_BLOCK, dtype=system.dtype, device=system.device)
    low_2 = low @ low
    inverse = (eye - low) @ (eye + low_2) @ (eye + low_2 @ low_2)
    size = _BLOCK
    while size < system.shape[-1]:
        below = _diagonal_blocks(system, 2 * size)[..., size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        merged = torch.zeros_like(below).repeat(*(1,) * (below.dim() - 2), 2, 2)
        merged[..., :size, :size] = first
        merged[..., size:, size:] = second
        merged[..., size:, :size] = -(second @ (below @ first))
        inverse, size = merged, 2 * size
    return inverse[..., 0, :, :]


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """(..., S / size, size, size) of (..., S, S)."""
    count = x.shape[-1] // size
    blocks = x.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
