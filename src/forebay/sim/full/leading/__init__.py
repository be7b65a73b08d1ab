"""Several controls of one simulated cluster: one leads, others wait, and leaders are killed, stopped and cut off."""
