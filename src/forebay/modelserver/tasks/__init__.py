"""Task endpoints with well-known formats, in front of repository models that declare the task."""
