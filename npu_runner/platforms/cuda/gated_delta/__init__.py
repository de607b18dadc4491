"""Gated DeltaNet on CUDA."""
