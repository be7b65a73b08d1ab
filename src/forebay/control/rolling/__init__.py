"""The parts of `control.deploying`: slots of two revisions, what is seen of them, what becomes of it in the store."""
