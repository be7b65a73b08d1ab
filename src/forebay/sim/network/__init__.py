"""An in-memory network under asyncio's transports: nodes, links, and faults."""
