"""Tiny random checkpoints of families that only transformers knows, written by transformers itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.oracle.tiny_checkpoints import VOCAB_SIZE, write_tokenizer

# By whatever of these names a family's config has; its own defaults otherwise.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "sliding_window": 1024, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "pad_token_id": 0,
    "ffn_dim": 96, "word_embed_proj_dim": 64,
}

# Names of sizes that few families have; what more some need to be small or whole.
MORE_SIZES: dict[str, Any] = {
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048, "dff": 96, "bos_token_id": 1, "ffn_hidden_size": 96,
    "local_attention": 2048, "moe_layer_start_index": 1, "moe_layer_end_index": 2, "word_embed_proj_dim": 64,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1}, "ernie4_5_moe": {"moe_k": 2},
    "falcon": {"head_dim": ..., "alibi": False},
    "gemma2": {"attn_logit_softcapping": None}, "granite": {"residual_multiplier": 0.5},  # as published ones, not 1
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16}, "nemotron": {"head_dim": 16},
}

def types_after(words: str) -> set[str]:
    """The types that docs/generic.md names in the paragraph that begins with these words."""
    page = (Path(__file__).parents[2] / "docs" / "generic.md").read_text()
    paragraph = re.search(rf"{words}(.*?)\n\n", page, re.DOTALL)
    return set(re.findall(r"`([\w.-]+)`", paragraph[1])) if paragraph else set()


SERVED = types_after(r"These \d+ are equal:")
SERVED_IMAGES = types_after(r"These \d+ image types are equal:")


def make_foreign_checkpoint(path: Path, model_type: str, **changes: Any) -> Path:
    """A random checkpoint of `model_type` in `path`, with weights scaled up so that greedy tokens vary."""
    from transformers import AutoModelForCausalLM

    ids = write_tokenizer(path)
    config = foreign_config(model_type, eos_token_id=ids["<|im_end|>"], **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(path)
    return path


def write_config_alone(path: Path, model_type: str, **changes: Any) -> Path:
    """A folder with config and tokenizer, and no weights: whoever needs those says another error."""
    ids = write_tokenizer(path)
    foreign_config(model_type, eos_token_id=ids["<|im_end|>"], **changes).save_pretrained(path)
    return path


def foreign_config(model_type: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    sizes = {name: size for name, size in SIZES.items() if default.get(name) is not None}
    given = {**sizes, **changes}
    return config_class(**{name: value for name, value in given.items() if value is not ...})


def small_config(model_type: str) -> Any:
    default = foreign_config(model_type).to_dict()
    sizes = {name: size for name, size in MORE_SIZES.items() if name in default}
    return {**sizes, **OF_FAMILY.get(model_type, {})}
