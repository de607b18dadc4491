"""The parts of a network, written as if for one device; and the sampler that turns its logits into tokens."""
