"""A checkpoint folder, read: where it is, what its small files say, its tensors by name. Builds no network."""
