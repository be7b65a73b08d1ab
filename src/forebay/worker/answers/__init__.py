"""Requests under way: the events of their work become their answers."""
