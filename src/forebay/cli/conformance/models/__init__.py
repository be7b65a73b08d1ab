"""Models of the conformance suite for Triton's Python backend: read as files, never imported.

They run wherever the server under test runs them, so they use nothing but numpy and what Python 3.8 has.
"""
