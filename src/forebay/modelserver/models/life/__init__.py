"""Life cycle of models: from a folder in a repository to a serving model, and back."""
