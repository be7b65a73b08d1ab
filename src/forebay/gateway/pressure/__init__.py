"""Load per model: what control scales by, and what clients are told while a model starts."""
