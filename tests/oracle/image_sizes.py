"""What the config of an image type needs beside small widths, so that a tiny checkpoint of it can be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _tower(**sizes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["vision_config"].update(sizes)


def _gemma3(fields: dict[str, Any]) -> None:
    fields["mm_tokens_per_image"] = 49
    fields["vision_config"].update(image_size=224, patch_size=16)


def _glm(fields: dict[str, Any]) -> None:
    fields["text_config"].update(head_dim=64, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [8, 12, 12]})


def _internvl(fields: dict[str, Any]) -> None:
    fields["vision_config"].update(image_size=[112, 112], patch_size=[14, 14])
    fields["image_seq_length"] = 16


def _vipllava(fields: dict[str, Any]) -> None:
    fields["vision_config"].update(image_size=112, patch_size=14)
    fields["vision_feature_layers"] = [-1, -2]


def _janus(fields: dict[str, Any]) -> None:
    fields["vision_config"]["projection_dim"] = fields["text_config"]["hidden_size"]


def _qwen2_vl(fields: dict[str, Any]) -> None:
    fields["vision_config"].update(hidden_size=fields["text_config"]["hidden_size"], embed_dim=160, num_heads=2)


def _ovis2(fields: dict[str, Any]) -> None:
    fields["hidden_size"] = fields["text_config"]["hidden_size"]


def _gemma4(fields: dict[str, Any]) -> None:
    fields["text_config"].update(
        num_hidden_layers=4, layer_types=["sliding_attention"] * 2 + ["full_attention"] * 2, head_dim=16,
        global_head_dim=32, sliding_window=64, hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
        num_attention_heads=2, num_key_value_heads=1, hidden_size=64)
    fields["vision_config"].update(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
                                   head_dim=16, intermediate_size=68)
    fields["audio_config"] = None


def _molmo2(fields: dict[str, Any]) -> None:
    fields["adapter_config"]["vision_feature_layer"] = [1, 0]


def _hunyuan_vl(fields: dict[str, Any]) -> None:
    fields["text_config"].update(head_dim=64, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 8, 8]})


def _granite4_vision(fields: dict[str, Any]) -> None:
    fields.update(deepstack_layer_map=[[0, 0]], downsample_rate="4/8")


def _muse_glimmer(fields: dict[str, Any]) -> None:
    fields["out_hidden_size"] = fields["vision_config"]["hidden_size"] * 4


def _step3p7(fields: dict[str, Any]) -> None:
    fields["text_config"]["sliding_window"] = 64


def _deepseek_ocr2(fields: dict[str, Any]) -> None:
    fields["text_config"]["mlp_layer_types"] = ["dense", "sparse"]


SIZES_OF: dict[str, Callable[[dict[str, Any]], None]] = {
    "molmo2": _molmo2, "hunyuan_vl": _hunyuan_vl, "granite4_vision": _granite4_vision,
    "muse_glimmer": _muse_glimmer, "step3p7": _step3p7, "deepseek_ocr2": _deepseek_ocr2,
    "gemma4": _gemma4, "aria": _tower(image_size=980, patch_size=14), "ovis2": _ovis2, "qwen2_vl": _qwen2_vl,
    "gemma3": _gemma3, "shieldgemma2": _gemma3, "glm46v": _glm, "glm4v": _glm, "glm4v_moe": _glm, "glmga": _glm,
    "internvl": _internvl, "qianfan_ocr": _internvl, "janus": _janus, "vipllava": _vipllava,
    "aya_vision": _tower(image_size=112, patch_size=14, num_attention_heads=2, hidden_size=128),
    "llava": _tower(image_size=112, patch_size=14), "video_llava": _tower(image_size=112, patch_size=14),
    "idefics3": _tower(image_size=364, patch_size=14), "smolvlm": _tower(image_size=364, patch_size=14)}
