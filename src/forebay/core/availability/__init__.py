"""Which replicas are on standby, how many spares an objective requires, and how it was met."""
