"""Which model a request goes to: the rules of `core.dispatch` applied to requests."""
