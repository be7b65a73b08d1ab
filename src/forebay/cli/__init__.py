"""Commands; build.py is the only place that wires parts together."""
