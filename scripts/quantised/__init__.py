"""Quantised copies of checkpoints: each format by rounding to the nearest, and whole folders of them."""
