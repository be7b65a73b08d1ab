"""Placement of a plan's replicas: nodes as described by the cluster file and the machine, and what fits on them."""
