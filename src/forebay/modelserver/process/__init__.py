"""Models in separate processes: the protocol with the server, tensor transport, supervision."""
