"""What no gateway on uvloop can be below: its sockets alone.

Each client gets a connection to a replica, in turn; what comes in on one goes out on the other, unread.

python bench/gateway/bare.py PORT REPLICA_PORT...
"""

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import cast

import uvloop

BACKLOG = 4096


class Side(asyncio.Protocol):
    """One of two connections that pass on to each other. What comes before the other one is there waits."""

    def __init__(self) -> None:
        self.other: Side | None = None
        self.transport: asyncio.Transport
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def join(self, other: "Side") -> None:
        """Pass on to the other from now on."""
        self.other = other
        if self._early:
            other.transport.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Client(Side):
    """The side of a client: when it is there, so will be that of a replica."""

    def __init__(self, replicas: Iterator[int], group: asyncio.TaskGroup) -> None:
        super().__init__()
        self._replicas = replicas
        self._group = group

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._group.create_task(self._connect())

    async def _connect(self) -> None:
        _, replica = await asyncio.get_running_loop().create_connection(Side, "127.0.0.1", next(self._replicas))
        replica.join(self)
        self.join(replica)


async def serve(port: int, replicas: list[int]) -> None:
    """Relay until the process is killed."""
    turns = itertools.cycle(replicas)
    async with asyncio.TaskGroup() as group:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Client(turns, group), "127.0.0.1", port, backlog=BACKLOG)
        await server.serve_forever()


if __name__ == "__main__":
    first, *others = map(int, sys.argv[1:])
    uvloop.run(serve(first, others))
