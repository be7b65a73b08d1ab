"""From a folder in a repository to a model that serves, and back."""
