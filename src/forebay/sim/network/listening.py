"""Listeners and ports."""

import asyncio
import errno
from collections.abc import Callable
from contextvars import Context
from itertools import count
from random import Random
from typing import Final, NamedTuple, NoReturn

Factory = Callable[[], asyncio.BaseProtocol]

LOOPBACK: Final = "127.0.0.1"
LOOPBACKS: Final = frozenset({"localhost", "::1"})
EVERY: Final = ""
EVERY_HOST: Final = frozenset({"0.0.0.0", "::", None})  # noqa: S104 - nothing is bound to it here
FREE_PORTS: Final = range(10_000, 32_768)
"""Range for port 0, assigned in turn: below the ports of clients."""


class Bound(NamedTuple):
    """The part of a listening socket's interface that servers use."""

    host: str
    port: int

    def getsockname(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    def dup(self) -> "Bound":
        """There is no descriptor to copy."""
        return self

    def setsockopt(self, *option: int) -> None:
        """No effect."""

    def accept(self) -> NoReturn:
        """There never is one: connections go directly to the listener's protocols. Raises BlockingIOError."""
        raise BlockingIOError

    def close(self) -> None:
        """No effect: the listener is closed instead."""


class Listener(asyncio.AbstractServer):
    """The result of `create_server`: accepts connections for `node` from the start until it is closed."""

    def __init__(self, ports: "Ports", factory: Factory, node: str, context: Context, *, shares: bool) -> None:
        self._ports = ports
        self.factory = factory
        self.node = node
        self.context = context
        self.shares = shares
        """Whether it shares the port with other such listeners: SO_REUSEPORT."""
        self.sockets: tuple[Bound, ...] = ()
        """One, or none once it is closed."""

    def close(self) -> None:
        """Stop accepting; connections stay open."""
        self._ports.release(self)
        self.sockets = ()

    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        return bool(self.sockets)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs."""
        return asyncio.get_running_loop()

    async def start_serving(self) -> None:
        """No effect: it serves from the start."""

    async def serve_forever(self) -> None:
        """Wait until cancelled."""
        await asyncio.get_running_loop().create_future()

    async def wait_closed(self) -> None:
        """No effect: closing is immediate."""


class Ports:
    """All addresses of the network. `rng` selects among several listeners of a port."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._listeners: dict[tuple[str, int], list[Listener]] = {}
        self._owners: dict[tuple[str, int], str] = {}  # the last node that bound it
        self._free = count().__next__

    def bind(self, listener: Listener, host: str | None, port: int) -> None:
        """Listen on a port; 0 finds a free one. Raises OSError (EADDRINUSE)."""
        name = _host(host)
        port = port or self._free_port()
        for (other_name, other_port), others in self._listeners.items():
            if other_port == port and (other_name == name or EVERY in (other_name, name)):
                if all(listener.shares and other.shares for other in others):
                    continue
                text = f"error while attempting to bind on address {(host, port)}: address already in use"
                raise OSError(errno.EADDRINUSE, text)
        self._listeners.setdefault((name, port), []).append(listener)
        self._owners[name, port] = listener.node
        listener.sockets = (Bound(host or "0.0.0.0", port),)  # noqa: S104 - what a real one says

    def release(self, listener: Listener) -> None:
        """Stop listening."""
        for listeners in self._listeners.values():
            if listener in listeners:
                listeners.remove(listener)

    def release_all(self, node: str) -> None:
        """Close all listeners of a node."""
        for listener in [each for listeners in self._listeners.values() for each in listeners if each.node == node]:
            listener.close()

    def find(self, host: str, port: int) -> tuple[str, Listener | None] | None:
        """The node of an address and its listener, if any; None: the address was never bound."""
        keys = ((_host(host), port), (EVERY, port))
        for key in keys:
            ready = self._listeners.get(key)
            if ready:
                listener = ready[self._rng.randrange(len(ready))] if len(ready) > 1 else ready[0]
                return listener.node, listener
        return next(((self._owners[key], None) for key in keys if key in self._owners), None)

    def _free_port(self) -> int:
        taken = {port for (_, port), listeners in self._listeners.items() if listeners}
        for _ in FREE_PORTS:
            port = FREE_PORTS[self._free() % len(FREE_PORTS)]
            if port not in taken:
                return port
        raise OSError(errno.EADDRINUSE, "no free port is left")


def _host(host: str | None) -> str:
    return EVERY if host in EVERY_HOST else LOOPBACK if host in LOOPBACKS else host or EVERY
