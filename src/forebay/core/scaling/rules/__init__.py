"""What other systems' autoscalers would want: their published formulas and defaults, one to a file."""
