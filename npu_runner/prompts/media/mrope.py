"""Three-dimensional rotary positions of Qwen-VL prompts (M-RoPE). Knows nothing of text or pixels.

Source: the Qwen2-VL report, section 2.1 (arXiv 2409.12191), with Qwen3-VL's rule that every image is one time step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npu_runner.request.prompt_inputs import ImageSpan

# T prompt tokens


def asks_for_mrope(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json names an `mrope_section`; families that have a default know it themselves."""
    text_config = config.get("text_config") or config
    for name in ("rope_parameters", "rope_scaling"):
        rope = text_config.get(name)
        if isinstance(rope, Mapping) and "mrope_section" in rope:
            return True
    return False


def mrope_positions(
    num_tokens: int, spans: Sequence[ImageSpan], grids_thw: Sequence[tuple[int, int, int]], merge_size: int
) -> tuple[np.ndarray, int]:
    """Positions int32 (3, T) and the delta: token i after the prompt has position i + delta in all three rows.

    Text counts up in all rows. An image's tokens share one time; its rows and columns count from that same number,
    and the text after it goes on past the image's longer side. `spans` are in prompt order; grids by image_index.
    """
    positions_3T = np.empty((3, num_tokens), dtype=np.int32)
    next_position, token = 0, 0
    for span in spans:
        num_text = span.start - token
        positions_3T[:, token : span.start] = np.arange(next_position, next_position + num_text)
        next_position += num_text
        _, grid_height, grid_width = grids_thw[span.image_index]
        height, width = grid_height // merge_size, grid_width // merge_size
        assert height * width == span.num_tokens, f"{span.num_tokens} tokens for {height}x{width} merged patches"
        end = span.start + span.num_tokens
        positions_3T[0, span.start : end] = next_position
        positions_3T[1, span.start : end] = next_position + np.repeat(np.arange(height), width)
        positions_3T[2, span.start : end] = next_position + np.tile(np.arange(width), height)
        next_position += max(height, width)
        token = end
    positions_3T[:, token:] = np.arange(next_position, next_position + num_tokens - token)
    next_position += num_tokens - token
    return positions_3T, next_position - num_tokens
