"""`forebay nodes`, `drain` and `undrain`: how nodes and GPUs are, and taking them out of service."""
