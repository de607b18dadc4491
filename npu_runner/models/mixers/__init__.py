"""What a decoder layer is put together from: sequence mixers, which mix tokens, and channel mixers, which do not."""
