"""Models written in Python: what Triton's Python backend offers them, in a process of their own."""
