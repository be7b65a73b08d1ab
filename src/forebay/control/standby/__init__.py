"""Standby replicas, the availability history of serving ones, and estimates from it."""
