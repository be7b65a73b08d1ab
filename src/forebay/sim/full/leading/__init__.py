"""Several controllers of one simulated cluster: leaders are killed, paused and cut off."""
