"""Tasks on pictures: what is on them, where, which part is what, and what is written there."""
