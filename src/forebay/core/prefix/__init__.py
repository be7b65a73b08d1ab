"""Which prompt prefixes are cached where."""
