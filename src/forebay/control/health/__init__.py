"""The health of nodes and GPUs: what sources report, what follows of it, and what people say to it."""
