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
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import read_video_pyav

from tests.oracle.positions_reference import ONE_RUN

PATCH, MERGE, DEPTH = 16, 2, 2


def _rules_of(family: str) -> Any:
    """transformers' module of that family's videos. It imports torchvision, which no function below touches."""
    name = "torchvision.transforms.v2.functional"
    missing = [part for count in range(4) if (part := name.rsplit(".", count)[0]) not in sys.modules]
    sys.modules.update({part: ModuleType(part) for part in missing})
    try:
        return importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
    finally:
        for part in missing:
            del sys.modules[part]


OF_FRAMES, GLM4V, GLM46V = (_rules_of(family) for family in ("qwen2_vl", "glm4v", "glm46v"))
GLM_PROCESSORS = {"glm4v": Glm4vProcessor, "glm46v": Glm46VProcessor, "glm_ocr": Glm46VProcessor}
"""Of families whose pairs of frames are images in the prompt."""


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


def frame_size(num_frames: int, height: int, width: int, size: dict[str, int],
               side: int = PATCH * MERGE) -> tuple[int, int]:
    """GLM's function is the same (tests/prompts/test_video_paces.py). A video of one frame is one transformers refuses;
    here it is shown twice."""
    return smart_resize(num_frames=max(num_frames, DEPTH), height=height, width=width, temporal_factor=DEPTH,
                        factor=side, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


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


def decode_by_the_clock(data: bytes, model_type: str) -> tuple[np.ndarray, Any]:
    """As `decode`, by the rules of GLM. All frames are decoded and then chosen: transformers' own reader shows a frame
    once that is chosen twice, others do not. A video too short for any frame is shown by its first."""
    sampler: Any = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=DEPTH)
    frames, metadata = read_video_pyav(io.BytesIO(data), lambda metadata: np.arange(metadata.total_num_frames))
    processor = GLM4V.Glm4vVideoProcessor if model_type == "glm4v" else GLM46V.Glm46VVideoProcessor
    indices = processor.sample_frames(sampler, metadata)
    metadata.frames_indices = indices if len(indices) else np.zeros(DEPTH, dtype=int)
    return frames[metadata.frames_indices], metadata


def model_type_of(path: Path) -> str:
    return str(json.loads((path / "config.json").read_text())["model_type"])


def video_inputs(path: Path, videos: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """pixel_values_videos, video_grid_thw, and for Qwen2.5-VL second_per_grid_ts."""
    settings, model_type = read_settings(path), model_type_of(path)
    is_one_run = model_type in ONE_RUN
    is_of_images = model_type in GLM_PROCESSORS
    patch = settings.get("patch_size", 14 if is_one_run else PATCH)
    patches, grids, seconds = [], [], []
    for data in videos:
        frames, metadata = (decode_in_pairs(data) if is_one_run else
                            decode_by_the_clock(data, model_type) if is_of_images else decode(data))
        seconds.append(DEPTH / metadata.sampled_fps)
        height, width = (one_run_size(*frames.shape[1:3], patch, settings["size"]) if is_one_run
                         else frame_size(*frames.shape[:3], settings["size"], patch * MERGE))
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


def inputs_of_images(path: Path, ids: torch.Tensor, seen: Sequence[Any], stills: Any) -> dict[str, torch.Tensor]:
    """What a GLM model's forward takes, for `ids` (1, T). `seen`: images, and encoded videos as bytes; `stills`: makes
    pixel_values and image_grid_thw of an image.

    The model cannot tell images and pairs of frames apart where a prompt has both. Then pairs go in as images, which is
    what its own functions make of them.
    """
    processor = GLM_PROCESSORS[model_type_of(path)]
    if all(isinstance(item, bytes) for item in seen):
        config = json.loads((path / "config.json").read_text())
        bare = SimpleNamespace(image_token_id=config["image_token_id"], video_start_id=config["video_start_token_id"],
                               video_end_id=config["video_end_token_id"])
        kinds = processor.create_mm_token_type_ids(bare, ids.tolist())
        return {**video_inputs(path, seen), "mm_token_type_ids": torch.tensor(kinds, dtype=torch.int32)}
    patches, grids = [], []
    for item in seen:
        if isinstance(item, bytes):
            made = video_inputs(path, [item])
            patches.append(made["pixel_values_videos"])
            grids += [[1, *made["video_grid_thw"][0, 1:].tolist()]] * int(made["video_grid_thw"][0, 0])
        else:
            made = stills([item], return_tensors="pt")
            patches.append(made["pixel_values"])
            grids += made["image_grid_thw"].tolist()
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def glm_video_text(path: Path, data: bytes, grid_thw: Sequence[int]) -> str:
    """As `video_text`, of GLM's processors."""
    kind = GLM_PROCESSORS[model_type_of(path)]
    processor = kind.__new__(kind)
    processor.video_processor = SimpleNamespace(merge_size=MERGE)
    processor.image_token = "<|image|>"
    _, metadata = decode_by_the_clock(data, model_type_of(path))
    return processor.replace_video_token(
        {"video_grid_thw": torch.tensor([list(grid_thw)]), "video_metadata": [metadata]}, 0)
