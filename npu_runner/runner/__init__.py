"""One rank: weights, KV cache, decode graphs, and the steps that run on them."""
