"""How the Qwen families' configs describe their experts. Knows no layer."""

from __future__ import annotations

from npu_runner.checkpoint.config_reading import RawConfig
from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.errors import ModelError


def read_moe(config: RawConfig, *, renormalise: bool, has_shared: bool = False) -> MoEConfig:
    """The experts of every sparse layer."""
    text = config.text
    # transformers 5 writes the second name for some families.
    num_experts = int(text["num_experts"] if "num_experts" in text else text["num_local_experts"])
    top_k = int(text["num_experts_per_tok"])
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"num_experts_per_tok {top_k} of num_experts {num_experts} is not possible")
    return MoEConfig(
        num_experts=num_experts, top_k=top_k, intermediate_size=int(text["moe_intermediate_size"]),
        renormalise=renormalise,
        shared_intermediate_size=int(text["shared_expert_intermediate_size"]) if has_shared else None,
    )


def is_sparse_layer(config: RawConfig, index: int) -> bool:
    """Whether layer `index` has experts: `mlp_only_layers` and `decoder_sparse_step`, as transformers reads them."""
    text = config.text
    if index in (text.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(text.get("decoder_sparse_step") or 1) == 0
