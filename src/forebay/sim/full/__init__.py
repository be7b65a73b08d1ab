"""Whole clusters in virtual time: the real control, gateways and workers, and every byte between them."""
