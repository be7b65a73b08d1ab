"""`forebay serve --repository`: the model server, a drop-in replacement for Triton."""
