"""Requests of a model that is being rolled out: split between two revisions, mirrored, and reported."""
