"""Load per model: input of autoscaling, and the retry-after of a model that is starting."""
