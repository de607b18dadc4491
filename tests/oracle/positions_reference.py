"""The oracle for positions behind videos: transformers' own, but for where text goes on.

Release 5.23 continues past a video's longer side, even where its positions in time have gone further. Qwen2-VL and
Qwen2.5-VL were trained with text behind the largest position, as releases 4 have it. So transformers counts each
stretch up to the end of an image or video from 0, and the stretch begins behind the largest position before it.
"""

from __future__ import annotations

from typing import Any

import torch

ONE_RUN = ("qwen2_vl", "qwen2_5_vl")
"""Families that have a video as one run of tokens."""


def go_on_behind_the_largest_position(model: Any) -> None:
    """Replace `get_rope_index` of `model`, for one sequence."""
    own = model.get_rope_index

    def get_rope_index(input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, image_grid_thw: Any = None,
                       video_grid_thw: Any = None, second_per_grid_ts: Any = None, **rest: Any) -> Any:
        assert len(input_ids) == 1, "one sequence"
        grids = {1: image_grid_thw, 2: video_grid_thw}
        kinds, used, positions, start = mm_token_type_ids[0].tolist(), {1: 0, 2: 0}, [], 0
        edges = [at for at in range(1, len(kinds)) if kinds[at - 1] and kinds[at] != kinds[at - 1]] + [len(kinds)]
        behind = 0
        for edge in edges:
            given = {kind: None if grid is None else grid[used[kind]:] for kind, grid in grids.items()}
            seconds = {} if second_per_grid_ts is None else {"second_per_grid_ts": second_per_grid_ts[used[2]:]}
            part, _ = own(input_ids[:, start:edge], mm_token_type_ids[:, start:edge], given[1], given[2], **seconds)
            positions.append(part + behind)
            behind = int(positions[-1].max()) + 1
            if kinds[edge - 1]:
                used[kinds[edge - 1]] += 1
            start = edge
        return torch.cat(positions, dim=-1), torch.tensor([[behind - len(kinds)]])

    model.get_rope_index = get_rope_index
