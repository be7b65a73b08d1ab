"""Which model a request goes to: the rules of `core.dispatch` on real requests."""
