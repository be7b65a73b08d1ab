"""Bytes to values and back, sans-IO: no socket, no await."""
