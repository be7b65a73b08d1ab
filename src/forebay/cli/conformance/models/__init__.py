"""Models of the conformance suite for Triton's Python backend: copied as files, never imported.

They run on the server under test, so they use only numpy and Python 3.8.
"""
