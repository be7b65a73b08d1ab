"""Health of nodes and GPUs: what sources report, what follows from it, and drains by operators."""
