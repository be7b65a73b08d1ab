"""A fleet whose size changes: weeks of a model's load in seconds, with the real decisions on how many replicas."""
