"""Quality of a new revision's answers: golden sets, and pairs of answers compared."""
