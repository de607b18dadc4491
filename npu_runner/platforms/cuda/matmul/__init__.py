"""Matmuls on CUDA, by the form of the weight."""
