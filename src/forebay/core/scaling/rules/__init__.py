"""Other systems' autoscalers: their published formulas and defaults, one per file."""
