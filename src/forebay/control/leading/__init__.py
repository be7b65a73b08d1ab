"""Leader election among several controllers: waiting as a follower, and leading while the lease lasts."""
