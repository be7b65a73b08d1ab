"""Whole clusters on virtual time: the product's own control, gateways and workers, and every byte between them."""
