"""Commands; build.py is the only place that wires components together."""
