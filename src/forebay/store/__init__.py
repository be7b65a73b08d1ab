"""The store: what is wanted and what has happened, in SQLite or PostgreSQL, on one schema."""
