"""Checkpoint folders without weights: real shapes for `load_format="dummy"` and for transformers' from_config.

Shapes are those of the published config.json files. The tokenizer and chat template are shapes-vl's, because nothing
here depends on what the tokens mean; only its image tokens are put in place of the models' own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench.common import SHAPES_VL

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151936,
    "head_dim": 128, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151645,
}
_TINY_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1}
# Three layers of Gated DeltaNet, one of gated attention, and so on; class defaults of transformers where it has them.
_HYBRID: dict[str, Any] = {
    "dtype": "bfloat16", "vocab_size": 248320, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "attn_output_gate": True, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "full_attention_interval": 4, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "bos_token_id": 248044, "eos_token_id": 248046, "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}
_TINY_HYBRID: dict[str, Any] = {
    **_HYBRID, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {**_HYBRID["rope_parameters"], "mrope_section": [2, 1, 1]},
}
_DENSE_TEXT = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
_MOE_TEXT = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
_HYBRID_TEXT: dict[str, dict[str, Any]] = {
    "qwen3.6-35b-a3b": {**_HYBRID, **_MOE_TEXT, "hidden_size": 2048, "num_hidden_layers": 40,
                        "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256,
                        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                        "shared_expert_intermediate_size": 512},
    "qwen3.5-0.8b": {**_HYBRID, **_DENSE_TEXT, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
                     "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
                     "tie_word_embeddings": True, "mtp_num_hidden_layers": 1},
    "qwen3.5-4b": {**_HYBRID, **_DENSE_TEXT, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
                   "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True,
                   "mtp_num_hidden_layers": 1},
    "qwen3.5-9b": {**_HYBRID, **_DENSE_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
                   "num_attention_heads": 16, "num_key_value_heads": 4},
    "tiny-moe": {**_TINY_HYBRID, **_MOE_TEXT, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 32},
    "tiny-hybrid": {**_TINY_HYBRID, **_DENSE_TEXT, "intermediate_size": 96},
}
# Hidden size, MLP width, layers, heads, tied embeddings; of experts their number and width; of towers their depth.
_SIZES: dict[str, tuple[int, int, int, int, bool]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True), "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True), "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-14b": (5120, 17408, 40, 40, False), "qwen3-32b": (5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, False), "qwen3-vl-2b": (2048, 6144, 28, 16, True),
    "qwen3-vl-4b": (2560, 9728, 36, 32, True), "qwen3-vl-8b": (4096, 12288, 36, 32, False),
    "qwen3-vl-32b": (5120, 25600, 64, 64, False),
}
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": []}


def _qwen3(name: str) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    return {**_QWEN3, **(_MOE if name == "qwen3-30b-a3b" else {}), **dict(zip(keys, _SIZES[name], strict=True))}


TEXT: dict[str, dict[str, Any]] = {
    **{name: _qwen3(name) for name in _SIZES if "-vl-" not in name},
    "tiny": {**_QWEN3, **_TINY_TEXT, "tie_word_embeddings": True},
    **_HYBRID_TEXT,
}
_VL_TEXT: dict[str, dict[str, Any]] = {
    **{name: {**_qwen3(name), "rope_scaling": {"rope_type": "default", "mrope_interleaved": True,
                                               "mrope_section": [24, 20, 20]}} for name in _SIZES if "-vl-" in name},
    "tiny-vl": {**TEXT["tiny"], "rope_scaling": {"rope_type": "default", "mrope_interleaved": True,
                                                 "mrope_section": [3, 3, 2]}},
}
_SMALLEST_TOWER = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
_TINY_TOWER = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_position_embeddings": 64}
_TOWERS: dict[str, dict[str, Any]] = {
    **{name: {**_SMALL_TOWER, "deepstack_visual_indexes": [5, 11, 17]} for name in ("qwen3-vl-2b", "qwen3-vl-4b")},
    **{name: {**_LARGE_TOWER, "deepstack_visual_indexes": [8, 16, 24]} for name in ("qwen3-vl-8b", "qwen3-vl-32b")},
    "tiny-vl": {**_TINY_TOWER, "deepstack_visual_indexes": [0, 1]},
    **{name: _TINY_TOWER if name.startswith("tiny") else _LARGE_TOWER for name in _HYBRID_TEXT},
    "qwen3.5-0.8b": _SMALLEST_TOWER, "qwen3.5-4b": _SMALL_TOWER,
}
FORMS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
             "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                  "fmt": "e4m3"},
}
"""Quantised forms of a checkpoint's weights: its `quantization_config`."""


def make_text_model(folder: Path, name: str, form: str | None = None) -> Path:
    """A folder for `LLM(folder, load_format="dummy")`, whose weights have a form of FORMS."""
    return _write(folder / name, TEXT[name] | ({"quantization_config": FORMS[form]} if form else {}))


def vision_config(name: str) -> dict[str, Any]:
    """The config.json of a model with a vision tower."""
    ours = json.loads((SHAPES_VL / "config.json").read_text())
    tokens = {key: ours[key] for key in ("image_token_id", "video_token_id", "vision_start_token_id",
                                         "vision_end_token_id")}
    if name in _HYBRID_TEXT:
        text = _HYBRID_TEXT[name]
        family = str(text["model_type"]).removesuffix("_text")
        architecture = str(text["architectures"][0]).replace("CausalLM", "ConditionalGeneration")
    else:
        family, architecture = "qwen3_vl", "Qwen3VLForConditionalGeneration"
        text = {**_VL_TEXT[name], "model_type": "qwen3_vl_text", "rope_theta": 5000000.0,
                "max_position_embeddings": 262144}
    vision = {"model_type": family, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "in_channels": 3, "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02, "num_heads": 16,
              "num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"], **_TOWERS[name]}
    return {"architectures": [architecture], "model_type": family, "dtype": "bfloat16",
            "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text, "vision_config": vision, **tokens}


def make_vision_model(folder: Path, name: str, side: int) -> Path:
    """The same for a model with a vision tower; images of up to side x side pixels are not scaled."""
    path = _write(folder / name, vision_config(name))
    settings = json.loads((SHAPES_VL / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 4096, "longest_edge": side * side}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def _write(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(SHAPES_VL / name, path / name)
    settings = json.loads((SHAPES_VL / "tokenizer_config.json").read_text())
    # vLLM serves no longer prompts than the tokenizer names.
    settings["model_max_length"] = config.get("text_config", config)["max_position_embeddings"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
