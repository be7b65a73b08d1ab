"""Every decision, as pure functions over frozen values: no clock, no IO, no async, no randomness."""
