"""The request loop: admit, route, relay, settle."""
