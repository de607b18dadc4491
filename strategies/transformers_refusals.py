"""What a config of transformers says that our paged attention does not do. Knows names of fields; runs nothing.

What no field says is found by running the network without weights (models/transformers_probe.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

_ATTENDING = {"full_attention", "sliding_attention"}
_GROWING_ROPES = ("dynamic", "longrope")


def refuse(config: Any, model_class: Any) -> str | None:
    """The first reason why a model of `model_class` with this config is not served; None where none is known."""
    return next(_reasons(config, model_class), None)


def _reasons(config: Any, model_class: Any) -> Iterator[str]:
    fields = config.to_dict()  # attributes of configs whose layers differ must not be asked for
    if fields.get("is_encoder_decoder") or fields.get("add_cross_attention"):
        yield "it has an encoder, or cross attention; only decoders are served"
    if _other_parts(config):
        yield f"it is more than a text model ({', '.join(_other_parts(config))})"
    if getattr(model_class, "_is_stateful", False):
        yield "its layers keep a state of another kind than keys and values (mamba, linear attention)"
    others = sorted(set(fields.get("layer_types") or ()) - _ATTENDING)
    if others:
        yield f"its layer_types name {', '.join(map(repr, others))}; served are {', '.join(sorted(_ATTENDING))}"
    if fields.get("kv_lora_rank"):
        yield f"its attention is latent (kv_lora_rank {fields['kv_lora_rank']})"
    if fields.get("num_kv_shared_layers"):
        yield f"layers share keys and values (num_kv_shared_layers {fields['num_kv_shared_layers']})"
    if fields.get("attn_logit_softcapping"):
        yield (f"it caps attention's logits softly (attn_logit_softcapping {fields['attn_logit_softcapping']}), which "
               "the platform's attention does not")
    if fields.get("alibi"):
        yield "its positions are a bias on attention (alibi)"
    if fields.get("is_causal") is False or fields.get("use_bidirectional_attention"):
        yield "it attends in both directions"
    if not model_class._can_set_attn_implementation():
        yield "its attention does not go through transformers' attention interface"


def _other_parts(config: Any) -> list[str]:
    """Names of the sub-configs that are of no text model."""
    return [name for name in config.sub_configs if any(part in name for part in ("text", "vision", "audio", "vq"))]


def growing_rope(config: Any) -> tuple[str, int] | None:
    """(kind, positions) of a rotary embedding that looks at the longest position of a batch beyond so many."""
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        if kind in _GROWING_ROPES:
            return kind, int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return None


def without_growth(config: Any) -> Any:
    """A copy whose rotary embedding looks at no values of positions: a run without weights has none."""
    copied = copy.deepcopy(config)
    for rope in _ropes(copied):
        if rope.get("rope_type") in _GROWING_ROPES:
            rope["rope_type"] = "default"
    return copied


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary embedding's parameters, or those of each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(of_layer for of_layer in parameters.values() if isinstance(of_layer, dict))]
