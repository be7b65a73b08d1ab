"""Forebay: the production inference platform in one Python package."""

__version__ = "0.1.0"
