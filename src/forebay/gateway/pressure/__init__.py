"""Load per model: input of autoscaling."""
