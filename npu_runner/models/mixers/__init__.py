"""Parts of a decoder layer: sequence mixers, which mix tokens, and channel mixers, which do not."""
