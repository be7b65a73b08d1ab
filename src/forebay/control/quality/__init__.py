"""Quality of a new revision's responses: golden sets, and pairwise comparison."""
