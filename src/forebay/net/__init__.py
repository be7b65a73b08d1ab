"""HTTP/1.1 on asyncio protocols, both sides: what gateway and worker share of the data plane."""
