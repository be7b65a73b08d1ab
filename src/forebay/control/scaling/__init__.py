"""Replica counts: gateways are polled, `core.scaling` decides, the result is stored and reported."""
