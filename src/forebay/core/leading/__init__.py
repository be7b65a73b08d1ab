"""Leases: which of several controls leads, and whether a replica still belongs to anybody."""
