"""The real decision code in virtual time, over a simulated network and engines: for chaos tests and what-if."""
