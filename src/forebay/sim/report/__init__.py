"""Results of replays: figures with confidence intervals, curves, a page with charts."""
