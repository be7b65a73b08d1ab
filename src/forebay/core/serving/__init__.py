"""What a model server decides: batches, sequences, ensembles, versions, what fits into memory. Triton's rules."""
