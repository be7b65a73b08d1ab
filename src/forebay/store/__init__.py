"""The store: desired state and history, in SQLite or PostgreSQL, with one schema."""
