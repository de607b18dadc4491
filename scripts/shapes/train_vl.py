"""Makes the weights of npu_runner/assets/shapes-vl from nothing: fresh drawings in, a Qwen3-VL checkpoint out.

Only transformers' own Qwen3VLForConditionalGeneration is trained here (training.py). Needs one GPU for some
minutes; a few steps on a CPU show that it works.

    python -m scripts.shapes.train_vl --output npu_runner/assets/shapes-vl --steps 12000
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from scripts.shapes.training import Family, branch_mask, encode_images, train


def forward(model: Qwen3VLForConditionalGeneration, batch: dict[str, Any]) -> Tensor:
    """Logits of the answer tokens only, (answer tokens, vocabulary)."""
    vision = encode_images(model, batch)
    images = BaseModelOutputWithDeepstackFeatures(
        pooler_output=[vision.pooler_output], deepstack_features=[[level] for level in vision.deepstack_features])
    hidden = model.model(
        input_ids=batch["input_ids"], attention_mask=branch_mask(batch["branches"]), position_ids=batch["positions"],
        mm_encoder_outputs={"image": images}, use_cache=False).last_hidden_state
    return model.lm_head(hidden.flatten(0, 1)[batch["predicting"]]).float()


if __name__ == "__main__":
    train(Family("train_vl", __doc__ or "", "shapes-vl", Qwen3VLForConditionalGeneration, forward))
