"""The small model that CUDA tests quantise: its sizes, its prompt and its limit."""

from __future__ import annotations

LIMIT = 2.0
PROMPT, COUNT = [3, 17, 5, 40, 11, 29, 8], 6
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 128, "num_hidden_layers": 2}
