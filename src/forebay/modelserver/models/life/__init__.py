"""From a folder in a repository to a serving model, and back."""
