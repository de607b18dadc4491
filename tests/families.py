"""One entry a family: the tiny checkpoint that stands for it, and what comparisons change of it.

What goes through all families is derived from FAMILIES: transformers as the oracle (tests/oracle/test_families.py), two
ranks (tests/oracle/test_tensor_parallel.py), the npu platform (tests/npu/test_families.py), the table of docs/models.md
(tests/core/test_models_table.py). Knows no engine and no platform.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RANKS, EAGER, GRAPHS, MODES = "two ranks", "eager steps on npu", "captured graphs on npu", "all graph modes on npu"


_QWEN_TOKEN_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
                   "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}


@dataclass(frozen=True, kw_only=True)
class Family:
    text: dict[str, Any] = field(default_factory=dict)
    """What its text config has beside or instead of tiny_checkpoints.TEXT; None: nothing of that name. Token ids that
    transformers sets by default (pad_token_id 32000, ...) may lie outside the tiny vocabulary: name them here, as 0."""
    vision: dict[str, Any] | None = None
    """What its tower's config has beside or instead of tiny_checkpoints.VISION; None: it sees no images."""
    tokens: dict[str, str] = field(default_factory=dict)
    """What its checkpoints call the tokens of tiny_checkpoints.SPECIAL_TOKENS; others are its own in addition."""
    token_ids: dict[str, str] = field(default_factory=lambda: dict(_QWEN_TOKEN_IDS))
    """The fields of its config that hold a token's id, with the token."""
    template: dict[str, str] = field(default_factory=dict)
    """What stands in its chat template instead of parts of tiny_checkpoints.TEMPLATE, before tokens have its names."""
    image_processor: str = "Qwen2VLImageProcessor"
    """transformers' class."""
    images: dict[str, Any] = field(default_factory=dict)
    """What its preprocessor_config.json has instead of what all have (tiny_checkpoints.write_preprocessor)."""
    accepts_videos: bool = True
    """If it sees images."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other configs that are compared with transformers, each under a few words that say what is different."""
    more: tuple[str, ...] = ()
    """Those of the variants that are left to the full set: a variant of another family has what they change."""
    ranks: dict[str, Any] = field(default_factory=dict)
    """What two ranks change."""
    npu: tuple[dict[str, Any], ...] = ({},)
    """What the npu platform changes, for each comparison with the cpu platform."""
    fast: tuple[str, ...] = (RANKS, EAGER)
    """Comparisons that are in the fast set, which CI runs. The plain config always is. Families are
    taken out where another one goes the same way."""

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.text

    @property
    def has_states(self) -> bool:
        return "linear_num_key_heads" in self.text


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE: dict[str, Any] = {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
_UNLIKE_SECTIONS = {"tie_word_embeddings": True, "num_key_value_heads": 1,
                    "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 256}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "head_dim": 32,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}
"""Gated DeltaNet in three of four layers."""
_DELTA_MROPE = {**_DELTA, "rope_parameters": {**_DELTA["rope_parameters"], "mrope_section": [2, 1, 1]}}
_ONE_OF_EACH: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_ONE_LAYER, _TWO_LAYERS = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
"""Each layer of a captured graph is traced, one to two seconds each. Layers behind one another stand in the graphs of
families that have two kinds of them, or whose tower feeds several."""
_BIASED = {"attention_bias": True, "mlp_bias": True}

_GLM: dict[str, Any] = {
    "tokens": {"<|vision_start|>": "<|begin_of_image|>", "<|vision_end|>": "<|end_of_image|>",
               "<|image_pad|>": "<|image|>", "<|video_pad|>": "<|video|>",
               "<|begin_of_video|>": "<|begin_of_video|>", "<|end_of_video|>": "<|end_of_video|>"},
    "token_ids": {
        "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>"},
    "template": {"<|vision_start|><|video_pad|><|vision_end|>": "<|begin_of_video|><|video_pad|><|end_of_video|>"},
}
_GLM_TOWER: dict[str, Any] = {"num_position_embeddings": None, "patch_size": 14, "image_size": 112}
"""A learned grid of 8 x 8, where it has one."""
_GLM4V_TEXT: dict[str, Any] = {
    "head_dim": None, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}

FAMILIES: dict[str, Family] = {
    "glm4v": Family(
        text=_GLM4V_TEXT, vision=_GLM_TOWER, image_processor="Glm4vImageProcessor", fast=(), **_GLM,
        more=("tied, all dims turn, heads of 24, biases",),
        variants={
            "tied, all dims turn, heads of 24, biases": {
                "tie_word_embeddings": True, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]},
                "vision": {"hidden_size": 48, "attention_bias": True, "image_size": 42}},
        }),
    "glm46v": Family(text=_GLM4V_TEXT, vision=_GLM_TOWER, image_processor="Glm46VImageProcessor", fast=(), **_GLM),
    "glm_ocr": Family(
        text={"head_dim": 24, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [4, 3, 5]}},
        vision=_GLM_TOWER, image_processor="Glm46VImageProcessor", fast=(EAGER,), **_GLM,
        npu=({**_ONE_LAYER, "head_dim": 32, "rope_parameters": {
            **_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [5, 4, 7]}},),
        variants={
            "a part of a head turns, no biases": {
                "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
                "num_key_value_heads": 1, "vision": {"attention_bias": False, "hidden_size": 48}},
        }),
    "llama": Family(
        ranks=_BIASED, npu=(_BIASED,), fast=(), more=("tied", "one kv head"),
        variants={
            "tied": {"tie_word_embeddings": True},
            "all biases": _BIASED,
            "one kv head": {"num_key_value_heads": 1},
            "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
            "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "llama3 rope": {"rope_parameters": _LLAMA3},
            "yarn rope": {"rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}},
            "longrope": {"rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 1024,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], "long_factor": [2.0] * 8}},
        }),
    "mistral": Family(ranks={"sliding_window": 20}, npu=({"sliding_window": 20},), fast=()),
    "olmo2": Family(
        text={"head_dim": None}, more=("biased, tied",),
        variants={
            "biased, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "one kv head, head dim of its own": {"num_key_value_heads": 1, "head_dim": 24},
        },
        ranks={"num_key_value_heads": 1, "num_hidden_layers": 2},  # both ranks hold the key head
        npu=({"num_hidden_layers": 1},)),
    "paddleocr_vl": Family(
        text={**_MROPE, "rms_norm_eps": 1e-5}, accepts_videos=False,
        vision={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 2,
                "image_size": 70, "patch_size": 14, "depth": None, "num_heads": None, "out_hidden_size": None,
                "num_position_embeddings": None},
        image_processor="PaddleOCRVLImageProcessor", images={"temporal_patch_size": 1}, fast=(EAGER,),
        ranks={"use_bias": True, "num_hidden_layers": 2}, more=("tied, biases, heads wider than the hidden size",
              "tower of heads of 72 and its own eps, sections of unlike size"),
        npu=({"use_bias": True, "vision": {"hidden_size": 144, "num_hidden_layers": 2}, **_ONE_LAYER},),  # heads of 72
        variants={
            "tied, biases, heads wider than the hidden size": {
                "tie_word_embeddings": True, "use_bias": True, "head_dim": 32, "rope_parameters": {
                    **_ROPE, "mrope_section": [4, 6, 6]}},
            "tower of heads of 72 and its own eps, sections of unlike size": {
                **_UNLIKE_SECTIONS, "vision": {"hidden_size": 144, "layer_norm_eps": 1e-3, "hidden_act": "gelu"}},
        }),
    "qwen2": Family(
        text={"head_dim": None}, ranks={"num_key_value_heads": 1},  # fewer kv heads than ranks: both hold it
        npu=({"num_key_value_heads": 1},), fast=(), more=("no grouping", "tied, one kv head"),
        variants={
            "no grouping": {"num_key_value_heads": 4},
            "tied, one kv head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
        }),
    "qwen2_5_vl": Family(
        text={"head_dim": None, **_MROPE}, fast=(), more=("tied, sections of unlike size", "no layer sees all"),
        vision={"num_position_embeddings": None, "window_size": 64, "fullatt_block_indexes": [1, 3], "patch_size": 14},
        variants={
            "windows of 4 x 4, heads of 24": {"vision": {"window_size": 112, "hidden_size": 48}},
            "no layer sees all": {"vision": {"fullatt_block_indexes": []}},
            "tied, sections of unlike size": _UNLIKE_SECTIONS,
        }),
    "qwen2_vl": Family(
        text={"head_dim": None, **_MROPE}, fast=(),
        vision={"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "intermediate_size": None, "out_hidden_size": None,
                "num_position_embeddings": None, "patch_size": 14},
        variants={
            "tied, sections of unlike size, heads of 24, gelu": {
                **_UNLIKE_SECTIONS, "vision": {"embed_dim": 48, "hidden_act": "gelu", "mlp_ratio": 3}},
        }),
    "qwen3": Family(
        ranks={"vocab_size": 321},  # a vocabulary that does not divide
        npu=({"vocab_size": 321, "head_dim": 64, **_ONE_LAYER},), fast=(MODES,),  # two ranks capture it
        more=("tied, biased", "wide heads"),
        variants={
            "4 queries a head": {"num_attention_heads": 8, "num_key_value_heads": 2},
            "tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
            "wide heads": {"head_dim": 48, "num_attention_heads": 2, "num_key_value_heads": 2},
        }),
    "qwen3_moe": Family(
        text={**_EXPERTS, "norm_topk_prob": True}, ranks={"mlp_only_layers": [1]}, fast=(),
        more=("one expert a token", "all experts", "a dense layer between", "every other layer sparse", "tied, biased"),
        npu=({"head_dim": 64}, {"head_dim": 64, "norm_topk_prob": False, "decoder_sparse_step": 2},
             {"head_dim": 64, "num_experts": 1, "num_experts_per_tok": 1}),
        variants={
            "as the softmax has them": {"norm_topk_prob": False},
            "one expert a token": {"num_experts_per_tok": 1},
            "all experts": {"num_experts_per_tok": 8},
            "many experts, few chosen": {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "a dense layer between": {"mlp_only_layers": [1]},
            "every other layer sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
            "tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
        }),
    "qwen3_5": Family(text=_DELTA_MROPE, vision={}, npu=(_ONE_OF_EACH,), fast=()),
    "qwen3_5_text": Family(
        text=_DELTA_MROPE, ranks=_ONE_OF_EACH, fast=(), more=("tied, no grouping", "every second layer"),
        variants={
            "tied, no grouping": {"tie_word_embeddings": True, "linear_num_value_heads": 2},
            "biased, other sizes": {"attention_bias": True, "linear_key_head_dim": 24, "linear_value_head_dim": 8,
                                    "linear_conv_kernel_dim": 3},
            "every second layer": {"layer_types": ["full_attention", "linear_attention"] * 2},
        }),
    "qwen3_5_moe": Family(text={**_DELTA_MROPE, **_SHARED}, vision={}, ranks=_ONE_OF_EACH, fast=()),
    "qwen3_5_moe_text": Family(text={**_DELTA_MROPE, **_SHARED}, ranks=_ONE_OF_EACH, fast=()),
    "qwen3_next": Family(
        text={**_DELTA, **_SHARED}, ranks={"linear_num_value_heads": 6}, fast=(),
        variants={"three value heads a key head, dense layers": {
            "linear_num_value_heads": 6, "mlp_only_layers": [1, 3], "norm_topk_prob": False}}),
    "qwen3_vl": Family(
        text=_MROPE, vision={"deepstack_visual_indexes": [1, 2]}, ranks={"tie_word_embeddings": True},
        npu=({"tie_word_embeddings": True, **_TWO_LAYERS},), fast=(EAGER,), more=("tied, one kv head",),
        variants={
            "tied, one kv head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
            "tower of heads of 24, three levels": {
                "vision": {"hidden_size": 48, "num_heads": 2, "depth": 5, "deepstack_visual_indexes": [0, 2, 4]}},
        }),
    "qwen3_vl_moe": Family(text={**_MROPE, **_EXPERTS}, vision={"deepstack_visual_indexes": [1, 2]},
                           npu=({**_ONE_LAYER, "vision": {"deepstack_visual_indexes": [1]}},), fast=(GRAPHS,)),
}


def sees_images(model_type: str) -> bool:
    return model_type in FAMILIES and FAMILIES[model_type].vision is not None


def accepts_videos(model_type: str) -> bool:
    return sees_images(model_type) and FAMILIES[model_type].accepts_videos


def split_by(what: str) -> tuple[list[str], list[str]]:
    """Families whose comparison of that kind is in the fast set, and the others."""
    fast = [name for name, family in FAMILIES.items() if what in family.fast]
    return fast, [name for name in FAMILIES if name not in fast]
