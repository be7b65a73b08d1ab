"""Requests under way: checked, queued, run in batches, answered, counted."""
