"""Parts of `control.deploying`: slots of two revisions, what is observed of them, and what is stored."""
