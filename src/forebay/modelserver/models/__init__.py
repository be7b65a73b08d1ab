"""The models behind the fronts: their lives, who runs when and where, and what is counted of it."""
