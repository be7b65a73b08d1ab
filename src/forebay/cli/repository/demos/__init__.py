"""`forebay repository demo`: demo models for the model server."""
