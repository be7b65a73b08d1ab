"""How much is asked of each model: what control scales by, and what is said while a model starts."""
