"""HTTP/1.1 on asyncio protocols, both sides: the data plane code that gateway and worker share."""
