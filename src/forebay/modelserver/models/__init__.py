"""Models independent of the protocol: life cycle, scheduling, placement and execution."""
