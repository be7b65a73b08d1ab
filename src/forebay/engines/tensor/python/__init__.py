"""Models written in Python: the API of Triton's Python backend, in a separate process."""
