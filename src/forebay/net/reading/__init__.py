"""Reading requests from a connection, and rejecting what is none."""
