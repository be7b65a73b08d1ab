"""`forebay nodes`, `drain` and `undrain`: health of nodes and GPUs, and taking them out of service."""
