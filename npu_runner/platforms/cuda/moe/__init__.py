"""Mixture of experts on CUDA."""
