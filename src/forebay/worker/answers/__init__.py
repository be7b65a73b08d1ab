"""Requests in flight: engine events become answers."""
