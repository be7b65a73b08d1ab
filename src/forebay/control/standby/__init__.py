"""Replicas that are ready and rest, what has become of the ones that serve, and what can be promised of them."""
