"""Models in separate processes: the protocol with the server, shared memory, and supervision."""
