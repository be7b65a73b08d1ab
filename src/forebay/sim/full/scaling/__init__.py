"""Models of a simulated cluster that scale while faults happen."""
