"""Reads checkpoints: safetensors only, this rank's slices only, one tensor at a time."""
