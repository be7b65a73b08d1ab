"""Which model a request goes to: `core.dispatch` applied to requests."""
