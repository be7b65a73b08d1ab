"""Models of a simulated cluster whose number of replicas changes while faults happen."""
