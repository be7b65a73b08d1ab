"""Requests in flight: engine events become responses."""
