"""Models in processes of their own: what the server says to them, how tensors cross, how long they live."""
