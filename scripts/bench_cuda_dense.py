"""What stands beside attention in a dense decoder's step, the general operators and the kernels in their place.

Parts of bench_cuda_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bench_cuda_cases import DEVICE, Case

from npu_runner.layers import sampling_ops
from npu_runner.platforms.cuda.draw import draw_from_softmax

_VOCABULARY = 151_936


def draws() -> Iterator[Case]:
    """A token of each row from bfloat16 logits: drawn, or the most probable."""
    for batch_size in (1, 8, 64, 256):
        layers = [torch.randn(batch_size, _VOCABULARY, device=DEVICE).mul_(3).bfloat16() for _ in range(3)]
        uniforms_B1 = torch.rand(batch_size, 1, device=DEVICE)
        for kind, temperature in (("draw", 0.6), ("greedy", 0.0)):
            temperature_B1 = torch.full((batch_size, 1), temperature, device=DEVICE)

            def plain(index: int, layers: Any = layers, t: Any = temperature_B1, u: Any = uniforms_B1) -> Any:
                return plain_draw(layers[index % len(layers)], t, u)

            def kernels(index: int, layers: Any = layers, t: Any = temperature_B1, u: Any = uniforms_B1) -> Any:
                return draw_from_softmax(layers[index % len(layers)], t, u)

            def greedy(index: int, layers: Any = layers) -> Any:
                return sampling_ops.most_probable(layers[index % len(layers)])

            num_bytes = 2.0 * batch_size * _VOCABULARY
            for way, call in (("operators", plain if temperature else greedy), ("kernels", kernels)):
                yield Case(name=f"{kind} of {batch_size}, {way}", call=call, num_bytes=num_bytes, in_graph=True)


def plain_draw(logits_BV: torch.Tensor, temperature_B1: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """What the sampler does where a platform has no draw of its own."""
    largest_B1, tokens_B1 = sampling_ops.most_probable(logits_BV)
    unusable_B1 = sampling_ops.is_unusable(logits_BV, largest_B1)
    weights_BV = sampling_ops.token_weights(logits_BV.float(), largest_B1.float(), temperature_B1)
    return sampling_ops.draw(weights_BV, tokens_B1, uniform_B1, min_p_B1=None).masked_fill(unusable_B1, -1)
