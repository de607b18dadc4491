"""NVIDIA GPUs: where speed is measured until an Ascend host is at hand."""
