"""Tiny random checkpoints, made by transformers in its own format: the oracle's models and ours are the same files.

What a family's has of its own stands in tests/families.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.families import FAMILIES, sees_images

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                  "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NO_OTHERS: Mapping[str, str] = {}
VOCAB_SIZE = 320
IMAGE_SIZES = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                          "num_position_embeddings": 64, "patch_size": 16}


def make_checkpoint(path: Path, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32,
                    max_shard_size: str = "5GB", **changes: Any) -> Path:
    """A random checkpoint of `model_type` in `path`. `changes` go into the text config; `vision=...` into the tower's.

    Weights are scaled up so that greedy tokens vary and errors show.
    """
    family = FAMILIES[model_type]
    tokenizer_ids = write_tokenizer(path, family.tokens, family.template)
    vision = changes.pop("vision", {})
    text = {**TEXT, **family.text, **changes}
    text = {name: value for name, value in text.items() if value is not None}
    torch.manual_seed(seed)
    eos = tokenizer_ids["<|im_end|>"]
    if sees_images(model_type):
        model = _vision_model(model_type, text, vision, tokenizer_ids, eos)
        write_preprocessor(path, model.config.vision_config.patch_size, family.image_processor, **family.images)
    else:
        model = _text_model(model_type, text, eos)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-5.0, 1.0)  # some heads remember long
            else:
                parameter.normal_(0.0, 0.15)
    model.generation_config.eos_token_id = eos
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def _text_model(model_type: str, text: dict[str, Any], eos: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **text, eos_token_id=eos))


def _vision_model(model_type: str, text: dict[str, Any], vision: dict[str, Any], ids: dict[str, int], eos: int) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    tie = text.pop("tie_word_embeddings")
    tower = {**VISION, "out_hidden_size": text["hidden_size"], **(FAMILIES[model_type].vision or {}), **vision}
    tower = {name: value for name, value in tower.items() if value is not None}
    fields = dict(
        vision_config=tower, tie_word_embeddings=tie, eos_token_id=eos,
        **{field: ids[token] for field, token in FAMILIES[model_type].token_ids.items()},
    )
    config = AutoConfig.for_model(model_type, text_config=text, **fields)
    if config.tie_word_embeddings is not tie:  # the class of some text configs has the last word, and says yes
        config = AutoConfig.for_model(model_type, text_config={**text, "tie_word_embeddings": tie}, **fields)
    return AutoModelForImageTextToText.from_config(config)


def write_tokenizer(path: Path, names: Mapping[str, str] = _NO_OTHERS,
                    template: Mapping[str, str] = _NO_OTHERS) -> dict[str, int]:
    """A byte-level BPE tokenizer with Qwen's special tokens and a chat template; returns the special tokens' ids.

    `names`: what tokens are called instead, and those there are in addition; `template`: as in families.Family.
    """
    path.mkdir(parents=True, exist_ok=True)
    special = list(dict.fromkeys([*(names.get(token, token) for token in SPECIAL_TOKENS), *names.values()]))
    written = TEMPLATE
    for old, new in [*template.items(), *names.items()]:
        written = written.replace(old, new)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(special), special_tokens=[],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["what colour is the picture, and which of the two shows a circle?"] * 4, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "chat_template": written, "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return {token: tokenizer.token_to_id(token) for token in special}


def write_preprocessor(path: Path, patch_size: int = 16, processor: str = "Qwen2VLImageProcessor",
                       **changes: Any) -> None:
    settings = {"image_processor_type": processor, "patch_size": patch_size, "temporal_patch_size": 2,
                "merge_size": 2, "size": IMAGE_SIZES, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (path / "preprocessor_config.json").write_text(json.dumps({**settings, **changes}))
