"""Requests in flight: validated, queued, batched, executed, answered, counted."""
