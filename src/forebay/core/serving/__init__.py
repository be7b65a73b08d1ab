"""Decisions of a model server, by Triton's rules: batches, sequences, ensembles, versions, memory."""
