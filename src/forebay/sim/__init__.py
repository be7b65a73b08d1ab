"""The real decision code on virtual time, over a simulated network and engines: for chaos tests and what-if."""
