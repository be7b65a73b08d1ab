"""Leases: which of several controllers leads, and whether a replica still belongs to a cluster."""
