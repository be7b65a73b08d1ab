"""`forebay repository demo`: models to try the model server with."""
