"""The oracle: Hugging Face transformers in float32 on the CPU, given the same files, images and messages."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.families import sees_images
from tests.oracle.positions_reference import ONE_RUN, go_on_behind_the_largest_position

IMAGES_OF_VIDEOS = ("glm4v", "glm46v", "glm_ocr")
"""Families that have pairs of frames as images."""


answers_folder: Path | None = None
"""Answers of this run, for all of its processes (tests/oracle/conftest.py)."""


@lru_cache(maxsize=8)
def load_model(path: Path) -> Any:
    model = new_model(path, torch.float32)
    if model.config.model_type in ONE_RUN:
        go_on_behind_the_largest_position(model.model)
    return model


def new_model(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    is_seeing = sees_images(AutoConfig.from_pretrained(path).model_type)
    model_class = AutoModelForImageTextToText if is_seeing else AutoModelForCausalLM
    return model_class.from_pretrained(path, dtype=dtype).eval()


@lru_cache(maxsize=8)
def load_image_processor(path: Path) -> Any:
    """The one that the checkpoint names, in the form that works with Pillow alone."""
    import transformers

    name = json.loads((path / "preprocessor_config.json").read_text())["image_processor_type"]
    return getattr(transformers, f"{name}Pil").from_pretrained(path)


def model_inputs(path: Path, token_ids: Sequence[int], images: Sequence[Any] = ()) -> dict[str, torch.Tensor]:
    """What transformers' forward takes for one prompt whose placeholders are already expanded. `images`: images, and
    encoded videos as bytes."""
    config = load_model(path).config
    ids = torch.tensor([list(token_ids)])
    inputs = {"input_ids": ids}
    if sees_images(config.model_type):
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int()
        videos = [image for image in images if isinstance(image, bytes)]
        if videos and config.model_type in IMAGES_OF_VIDEOS:
            from tests.oracle.videos_reference import inputs_of_images  # as below

            return {**inputs, **inputs_of_images(path, ids, images, load_image_processor(path))}
        if videos:  # without any a model of random weights may still have chosen the placeholder
            inputs["mm_token_type_ids"] += 2 * (ids == config.video_token_id).int()
            from tests.oracle.videos_reference import video_inputs  # needs PyAV, an extra

            inputs.update(video_inputs(path, videos))
        if len(images) > len(videos):
            stills = [image for image in images if not isinstance(image, bytes)]
            features = load_image_processor(path)(stills, return_tensors="pt")
            inputs["pixel_values"] = features["pixel_values"]
            inputs["image_grid_thw"] = features["image_grid_thw"]
    return inputs


def generate(path: Path, token_ids: Sequence[int], images: Sequence[Any] = (), *,
             max_new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, past any EOS, and the (max_new_tokens, V) logits that each was taken from.

    A question that was asked before in this run, of a checkpoint with the same bytes, has its answer from then.
    """
    if answers_folder is None:
        return _generate(path, token_ids, images, max_new_tokens)
    asked = [image if isinstance(image, bytes) else (image.mode, image.size, image.tobytes()) for image in images]
    question = repr((_digest(path), list(token_ids), asked, max_new_tokens))
    file = answers_folder / f"{hashlib.sha256(question.encode()).hexdigest()}.pt"
    if not file.exists():
        new = file.with_suffix(f".{os.getpid()}")
        torch.save(_generate(path, token_ids, images, max_new_tokens), new)
        new.replace(file)
    tokens, logits = torch.load(file)
    return tokens, logits


@lru_cache(maxsize=256)
def _digest(path: Path) -> str:
    """Of every file of a checkpoint."""
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        digest.update(repr((file.name, file.stat().st_size)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@torch.inference_mode()
def _generate(path: Path, token_ids: Sequence[int], images: Sequence[Any],
              max_new_tokens: int) -> tuple[list[int], torch.Tensor]:
    output = load_model(path).generate(
        **model_inputs(path, token_ids, images), max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens,
        do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
    )
    return output.sequences[0, len(token_ids):].tolist(), torch.cat(output.logits).float()


def random_image(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Blocks of random colours: every patch differs, and resizing has something to smooth."""
    coarse = rng.integers(0, 256, (max(1, height // 9), max(1, width // 9), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
