"""NVIDIA GPUs: where speed is measured until an Ascend host is at hand."""

FP8_PROMPT_ROOM = 2
"""Of keys and values in e4m3 that a prefill reads, so many times the largest one's tokens have room in 16 bits."""
