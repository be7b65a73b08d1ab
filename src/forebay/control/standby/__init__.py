"""Standby replicas, the availability record of serving ones, and what can be promised of them."""
