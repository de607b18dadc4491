"""Everything of the embedded checkpoints but the weights: it is read from their folders. Knows no training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from npu_runner.assets import EMBEDDED

_IMAGES = json.loads((EMBEDDED["shapes-vl"] / "preprocessor_config.json").read_text())
PATCH, MERGE, TEMPORAL_PATCH = _IMAGES["patch_size"], _IMAGES["merge_size"], _IMAGES["temporal_patch_size"]
# Areas, not sides: a drawing of 128x128 up to 320x320 is only rounded to whole 32-pixel cells.
MIN_PIXELS, MAX_PIXELS = _IMAGES["size"]["shortest_edge"], _IMAGES["size"]["longest_edge"]
_COPIED = ("chat_template.jinja", "generation_config.json", "preprocessor_config.json", "tokenizer.json",
           "tokenizer_config.json")


def read_config(model: str) -> Any:
    """The real architecture at a size that lives in git."""
    config = AutoConfig.from_pretrained(EMBEDDED[model])
    config.dtype = None  # training has weights in float32
    return config


def read_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, learned from the questions and answers themselves: any UTF-8 text has an encoding."""
    return AutoTokenizer.from_pretrained(EMBEDDED["shapes-vl"])  # type: ignore[no-any-return]


def save_checkpoint(model: Any, name: str, folder: Path) -> Any:
    """Writes the folder with weights rounded to bfloat16 and returns the rounded model, which is what users get."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = type(model)(read_config(name))
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.save_pretrained(folder)
    for file in _COPIED:
        shutil.copy(EMBEDDED[name] / file, folder / file)
    return rounded
