"""What replays have found, for people: figures with their uncertainty, curves, a page with charts."""
