"""Decisions of the registry: the content of an artifact, and whether a revision may be served."""
