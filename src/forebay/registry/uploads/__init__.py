"""Uploads of artifacts from clients, until a revision is created from them."""
