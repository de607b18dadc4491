"""The config of shapes-hybrid; its tokenizer, chat template and folder are those of shapes-vl. Knows no training."""

from __future__ import annotations

from shapes_vl_checkpoint import MAX_POSITIONS, MERGE, PATCH, TEMPORAL_PATCH, VOCAB_SIZE
from transformers import PreTrainedTokenizerFast, Qwen3_5Config


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5Config:
    """Qwen3.5's architecture at a size that lives in git: three layers of Gated DeltaNet to one of attention, twice."""
    token_id = tokenizer.convert_tokens_to_ids
    return Qwen3_5Config(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 192,
            "intermediate_size": 352,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 6,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL_PATCH,
            "out_hidden_size": 192,
            "num_position_embeddings": 400,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )
