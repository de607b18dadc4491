"""Formats of quantised weights, one module each. A format tells which float tensors a checkpoint represents, and from
which stored tensors each is computed."""
