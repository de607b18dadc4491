"""Vision towers: patches of pictures in, embeddings for the decoder out."""
