"""Where replicas run: what they need, which nodes and devices have it, and why none does."""
