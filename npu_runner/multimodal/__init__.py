"""Prompts and pictures before and beside the engine: preprocessing for worker processes, and the vision cache."""
