"""How good the answers of a new revision are: golden sets that are asked of it, and pairs of answers compared."""
