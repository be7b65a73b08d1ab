"""Estimates how much memory a model will take, from its files and the engine's overhead."""
