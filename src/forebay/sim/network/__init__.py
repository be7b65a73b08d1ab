"""A network in memory under asyncio's transports: nodes, what lies between them, and what can go wrong with it."""
