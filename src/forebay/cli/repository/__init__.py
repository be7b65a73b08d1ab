"""`forebay serve --repository`: the model server, a drop-in for Triton."""
