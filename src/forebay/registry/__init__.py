"""Where models come from: sources, and the digests that verify them."""
