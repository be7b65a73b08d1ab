"""Where models come from: sources, and the digests that prove what arrived."""
