"""NVIDIA GPUs: where speed is measured until an Ascend host is at hand."""

FP8_PROMPT_ROOM = 2
"""See AttentionFacts.fp8_prompt_room."""
