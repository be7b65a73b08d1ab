"""How much memory a model will take: what its files say of its architecture, and what engines add to it."""
