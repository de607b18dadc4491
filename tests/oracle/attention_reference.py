"""The definition of attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q_QNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(H)) v in float64; the last Q tokens of the context ask, none sees what comes after it.

    window: each sees as many tokens, itself included.
    """
    group = q_QNH.shape[1] // k_LKH.shape[1]
    k_LNH, v_LNH = (x.double().repeat_interleave(group, dim=1) for x in (k_LKH, v_LKH))
    scores_NQL = torch.einsum("qnh,lnh->nql", q_QNH.double(), k_LNH) * q_QNH.shape[-1] ** -0.5
    num_new, length = scores_NQL.shape[1:]
    distance_QL = torch.arange(length - num_new, length)[:, None] - torch.arange(length)
    is_unseen_QL = (distance_QL < 0) | (distance_QL >= (window or length))
    weights_NQL = scores_NQL.masked_fill(is_unseen_QL, -torch.inf).softmax(-1)
    return torch.einsum("nql,lnh->qnh", weights_NQL, v_LNH)


def within_each(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: list[int]) -> Tensor:
    """softmax(q k^T / sqrt(H)) v in float64, image by image."""
    parts = zip(*(x.double().cpu().split(lengths) for x in (q_TNH, k_TNH, v_TNH)), strict=True)
    outputs = []
    for q_LNH, k_LNH, v_LNH in parts:
        scores_NLL = torch.einsum("qnh,lnh->nql", q_LNH, k_LNH) * q_LNH.shape[-1] ** -0.5
        outputs.append(torch.einsum("nql,lnh->qnh", scores_NLL.softmax(-1), v_LNH))
    return torch.cat(outputs)
