"""Rollouts in simulated clusters: the product's own, over a store that fails, with revisions that are often bad."""
