"""Sampling kernels for CUDA."""
