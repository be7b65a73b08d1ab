"""Rollouts in simulated clusters: the real code, over a store that fails, with revisions that are often bad."""
