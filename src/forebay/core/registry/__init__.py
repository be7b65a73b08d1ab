"""What the registry decides: what an artifact consists of, and whether a revision may be served."""
