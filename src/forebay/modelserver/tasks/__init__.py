"""Tasks: endpoints with shapes that people know, in front of models of the repository that say they do the task."""
