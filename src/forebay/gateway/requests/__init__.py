"""A request in the gateway: its state, and the relaying of its response."""
