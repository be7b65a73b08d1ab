"""The models of the conformance suite, as Triton's Python backend runs them: read as files, never imported by us.

They run wherever the server under test runs them, so they use nothing but numpy and what Python 3.8 has.
"""
