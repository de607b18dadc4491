"""The oracle for videos: transformers' decoding, sampling, sizes, patches and text, each called as it stands there.

Its video processor as a whole needs torchvision, of which there is no build for this torch. What it would do between
these steps is spelled out here: Pillow's bicubic resize (that of transformers' own image processor, which the tests of
tests/prompts compare with torch's), rescaling and normalising by their definition, and the seconds between pairs (by
transformers' own sampled_fps).
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import read_video_pyav

from tests.oracle.positions_reference import ONE_RUN

PATCH, MERGE, DEPTH = 16, 2, 2


def _rules_of_frames() -> Any:
    """transformers' module of Qwen2-VL's videos. It imports torchvision, which none of the functions below touches."""
    name = "torchvision.transforms.v2.functional"
    missing = [part for count in range(4) if (part := name.rsplit(".", count)[0]) not in sys.modules]
    sys.modules.update({part: ModuleType(part) for part in missing})
    try:
        return importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    finally:
        for part in missing:
            del sys.modules[part]


OF_FRAMES = _rules_of_frames()


def read_settings(path: Path) -> dict[str, Any]:
    file = path / "video_preprocessor_config.json"
    return json.loads((file if file.exists() else path / "preprocessor_config.json").read_text())


def decode(data: bytes, **settings: Any) -> tuple[np.ndarray, Any]:
    """The sampled frames (T, H, W, 3) and transformers' metadata. A video is decoded as it lies in its file: turning it
    is nothing transformers does here."""
    sampler = SimpleNamespace(**{"fps": 2, "min_frames": 4, "max_frames": 768, "num_frames": None, **settings})

    def sample(metadata: Any, **kwargs: Any) -> np.ndarray:
        return Qwen3VLVideoProcessor.sample_frames(sampler, metadata, **kwargs)

    return read_video_pyav(io.BytesIO(data), sample)


def frame_size(num_frames: int, height: int, width: int, size: dict[str, int]) -> tuple[int, int]:
    """A video of one frame is one transformers refuses; here it is shown twice."""
    return smart_resize(num_frames=max(num_frames, DEPTH), height=height, width=width, temporal_factor=DEPTH,
                        factor=PATCH * MERGE, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def decode_in_pairs(data: bytes, **settings: Any) -> tuple[np.ndarray, Any]:
    """As `decode`, by the rules of Qwen2-VL. A video of one frame is one that they refuse."""
    sampler = SimpleNamespace(**{"fps": 2, "min_frames": 4, "max_frames": 768, "num_frames": None,
                                 "temporal_patch_size": DEPTH, **settings})

    def sample(metadata: Any, **kwargs: Any) -> np.ndarray:
        if metadata.total_num_frames == 1:
            return np.array([0])
        return OF_FRAMES.Qwen2VLVideoProcessor.sample_frames(sampler, metadata, **kwargs).numpy()

    return read_video_pyav(io.BytesIO(data), sample)


def one_run_size(height: int, width: int, patch: int, size: dict[str, int]) -> tuple[int, int]:
    return OF_FRAMES.smart_resize(height, width, factor=patch * MERGE, min_pixels=size["shortest_edge"],
                                  max_pixels=size["longest_edge"])


def model_type_of(path: Path) -> str:
    return str(json.loads((path / "config.json").read_text())["model_type"])


def video_inputs(path: Path, videos: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """pixel_values_videos, video_grid_thw, and for Qwen2.5-VL second_per_grid_ts."""
    settings, model_type = read_settings(path), model_type_of(path)
    is_one_run = model_type in ONE_RUN
    patch = settings.get("patch_size", 14 if is_one_run else PATCH)
    patches, grids, seconds = [], [], []
    for data in videos:
        frames, metadata = decode_in_pairs(data) if is_one_run else decode(data)
        seconds.append(DEPTH / metadata.sampled_fps)
        height, width = (one_run_size(*frames.shape[1:3], patch, settings["size"]) if is_one_run
                         else frame_size(*frames.shape[:3], settings["size"]))
        resized = [np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
                   for frame in frames]  # fmt: skip
        values = np.stack(resized).astype(np.float32) * np.float32(1 / 255)
        values = (values - np.float32(settings["image_mean"])) / np.float32(settings["image_std"])
        video = torch.from_numpy(values).permute(0, 3, 1, 2)[None]
        processor = OF_FRAMES.Qwen2VLVideoProcessor if is_one_run else Qwen3VLVideoProcessor
        made, *grid = processor.patchify(None, video, patch, MERGE, DEPTH)
        patches.append(made[0])
        grids.append(grid)
    inputs = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
    return {**inputs, "second_per_grid_ts": torch.tensor(seconds)} if model_type == "qwen2_5_vl" else inputs


def video_text(data: bytes, grid_thw: Sequence[int]) -> str:
    """What transformers' processor writes in the place of the video's placeholder."""
    _, metadata = decode(data)
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_processor = SimpleNamespace(merge_size=MERGE, temporal_patch_size=DEPTH)
    processor.video_token, processor.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    inputs = {"video_grid_thw": torch.tensor([list(grid_thw)]), "video_metadata": [metadata]}
    return processor.replace_video_token(inputs, 0)
