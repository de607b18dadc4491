"""Makes the weights of npu_runner/assets/shapes-hybrid: fresh drawings in, a Qwen3.5 checkpoint out.

Only transformers' own Qwen3_5ForConditionalGeneration is trained here (training.py), its recurrence computed by
branched_delta_net.py. It begins with the tower and the embeddings of shapes-vl, which has the same tokenizer and the
same images, and learns those on. Needs one GPU for some minutes; a few steps on a CPU show that it works.

    python -m scripts.shapes.train_hybrid --output npu_runner/assets/shapes-hybrid --steps 6000
"""

from __future__ import annotations

import math
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3_5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from npu_runner.assets import SHAPES_VL
from scripts.shapes.batches import PADDING_BRANCH
from scripts.shapes.branched_delta_net import use_branches
from scripts.shapes.training import Family, branch_mask, encode_images, train

_COPIED = ("model.visual.", "model.language_model.embed_tokens.")


def forward(model: Qwen3_5ForConditionalGeneration, batch: dict[str, Any]) -> Tensor:
    """Logits of the answer tokens only, (answer tokens, vocabulary)."""
    images = BaseModelOutputWithPooling(pooler_output=[encode_images(model, batch).pooler_output])
    hidden = model.model(
        input_ids=batch["input_ids"], position_ids=batch["positions"], mm_encoder_outputs={"image": images},
        attention_mask={"full_attention": branch_mask(batch["branches"]), "linear_attention": None}, use_cache=False,
        branch_grid=batch["branch_grid"], valid_BT=(batch["branches"] != PADDING_BRANCH).float()).last_hidden_state
    return model.lm_head(hidden.flatten(0, 1)[batch["predicting"]]).float()


def remember_long(model: nn.Module) -> None:
    """Start with gates whose steps lie between a thousandth and a tenth, evenly by their logarithm, as Mamba's do
    (arXiv 2312.00752, section 3.6). A state then remembers for tens to thousands of tokens, not for a few."""
    for layer in model.modules():
        if isinstance(layer, Qwen3_5GatedDeltaNet):
            steps = torch.empty_like(layer.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            with torch.no_grad():
                layer.dt_bias.copy_(steps + (-(-steps).expm1()).log())  # whose softplus is the step
                layer.A_log.copy_(torch.empty_like(layer.A_log).uniform_(1.0, 16.0).log())


def start(model: nn.Module) -> None:
    """Long memories, and shapes-vl's tower and embeddings without the levels that this family's tower lacks."""
    remember_long(model)
    weights = {name: tensor.float() for name, tensor in load_file(SHAPES_VL / "model.safetensors").items()
               if name.startswith(_COPIED) and "deepstack" not in name}
    missing, unknown = model.load_state_dict(weights, strict=False)
    left = [name for name in missing if name.startswith(_COPIED)]
    if left or unknown:
        raise SystemExit(f"{SHAPES_VL} has other tensors than this model begins with: {left or unknown}")


if __name__ == "__main__":
    use_branches()
    train(Family("train_hybrid", __doc__ or "", "shapes-hybrid", Qwen3_5ForConditionalGeneration, forward,
                 start=start, by_branch=True))
