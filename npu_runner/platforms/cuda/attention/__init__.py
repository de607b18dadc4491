"""Attention on CUDA: paged prefill and decode, and images."""
