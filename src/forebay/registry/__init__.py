"""The model registry: sources of models, and the digests that verify them."""
