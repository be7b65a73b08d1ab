"""Input of a simulation: traces that are read, and generated workloads."""
