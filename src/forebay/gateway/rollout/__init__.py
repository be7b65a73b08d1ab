"""A model that is being rolled out: its requests divided between two revisions, copied, and told of."""
