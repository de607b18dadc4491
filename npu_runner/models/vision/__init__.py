"""Vision towers: patches of images in, embeddings for the decoder out."""
