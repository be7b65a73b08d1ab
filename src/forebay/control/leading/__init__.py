"""One control among several: waiting for its turn, leading while its lease lasts, and what it says of that."""
