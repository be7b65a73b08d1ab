"""A fleet that scales: weeks of a model's load in seconds, with the real scaling decisions."""
