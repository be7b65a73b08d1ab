"""Metric table, structured logs, the wall clock."""
