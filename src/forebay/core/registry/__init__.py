"""Decisions of the registry: what an artifact consists of, and whether a revision may be served."""
