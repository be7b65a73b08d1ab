"""What a simulation is fed with: traces that are read, and workloads that are made."""
