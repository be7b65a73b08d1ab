"""The simulated network: listeners, connections, and faults.

Nodes are processes. Code inside `with network.node("gateway-0")`, with all its tasks and connections, belongs to that
node; outside of any it is the node "". There is one address space: a port belongs to the host it was bound to, and to
all hosts if that was `0.0.0.0`, `::`, empty or None; loopback addresses are equivalent.
"""

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import count
from random import Random
from typing import Final

from forebay.sim.loop import VirtualLoop
from forebay.sim.network.links import ANY, AT_ONCE, Links, Shape
from forebay.sim.network.listening import Factory, Listener, Ports
from forebay.sim.network.transport import Address, Transport

CLIENT_HOST: Final = "127.0.0.1"
CLIENT_PORTS: Final = range(32_768, 61_000)
CONNECT_TRIES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Linux's SYN retransmission timeouts, after which it gives up (`tcp_syn_retries` in tcp(7))."""

_NODE: ContextVar[str] = ContextVar("node", default="")


class Network:
    """Pass it to `forebay.sim.loop.run`, once. `rng` draws jitter, listeners of shared ports, and segment sizes.

    `chop`: received data is delivered in pieces of random sizes, so that parsers see messages split everywhere.
    """

    def __init__(self, rng: Random, *, chop: bool = False) -> None:
        self._rng = rng
        self._chop = rng if chop else None
        self._links = Links(rng)
        self._ports = Ports(rng)
        self._refusing: dict[str, None] = {}
        self._vanished: dict[str, None] = {}
        self._frozen: dict[str, None] = {}
        self._pairs: dict[int, tuple[Transport, Transport]] = {}
        self._number = count().__next__

    @contextmanager
    def node(self, name: str) -> Iterator[None]:
        """Run as that node."""
        token = _NODE.set(name)
        try:
            yield
        finally:
            _NODE.reset(token)

    @property
    def connections(self) -> int:
        """Connections that are open at at least one end."""
        return len(self._pairs)

    # --- for the loop

    async def create_server(
        self, factory: Factory, host: str | None, port: int, **options: object
    ) -> asyncio.AbstractServer:
        """Listen on the current node. Raises OSError (EADDRINUSE)."""
        _check(options)
        shares = bool(options.get("reuse_port"))
        listener = Listener(self._ports, factory, _NODE.get(), copy_context(), shares=shares)
        self._ports.bind(listener, host, port)
        return listener

    async def create_connection(
        self, factory: Factory, host: str, port: int, **options: object
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect from the current node. Raises ConnectionRefusedError, or TimeoutError after 127 s."""
        _check(options)
        listener = await self._reach(_NODE.get(), host, port)
        client = self._connect(listener, (host, port))
        try:
            await asyncio.sleep(self._way_s(listener.node, _NODE.get()))
            protocol = factory()
        except BaseException:
            client.die()
            raise
        client.start(protocol)
        try:
            await asyncio.sleep(0)  # connection_made runs first
        except BaseException:  # as in asyncio: otherwise it would leak
            client.close()
            raise
        return client, protocol

    async def _reach(self, node: str, host: str, port: int) -> Listener:
        for patience_s in CONNECT_TRIES_S:
            found = self._ports.find(host, port)
            if found is None:
                raise _refused(host, port)
            there, listener = found
            links = self._links.between(node, there), self._links.between(there, node)
            if any(link.cut for link in links) or there in self._vanished:
                await asyncio.sleep(patience_s)
                continue
            await asyncio.sleep(self._way_s(node, there))
            if listener is not None and listener.is_serving() and there not in self._refusing:
                return listener
            await asyncio.sleep(self._way_s(there, node))
            raise _refused(host, port)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def _way_s(self, sender: str, receiver: str) -> float:
        now = asyncio.get_running_loop().time()
        return self._links.between(sender, receiver).arrival_s(now, 0) - now

    def _connect(self, listener: Listener, to: Address) -> Transport:
        """Connect two ends; the listener is notified soon, the client's end is returned."""
        loop, number, here, there = asyncio.get_running_loop(), self._number(), _NODE.get(), listener.node
        name = CLIENT_HOST, CLIENT_PORTS[number % len(CLIENT_PORTS)]
        make = partial(Transport, loop, chop=self._chop, forget=partial(self._forget, number))
        out, back = self._links.between(here, there), self._links.between(there, here)
        client = make(here, out, copy_context(), names=(name, to))
        server = make(there, back, listener.context, names=(to, name))
        client.socket.peer, server.socket.peer = server.socket, client.socket
        self._pairs[number] = client, server
        loop.call_soon(lambda: server.start(listener.factory()), context=listener.context)
        return client

    def _forget(self, number: int) -> None:
        pair = self._pairs.get(number)
        if pair is not None and all(end.socket.closed or end.socket.silent for end in pair):
            del self._pairs[number]

    # --- faults. `b` may be left out: then it is every other node.

    def shape(self, a: str, b: str = ANY, shape: Shape = AT_ONCE) -> None:
        """Delay data sent between two nodes from now on, in both directions."""
        self._links.shape(a, b, shape)

    def quicken(self, a: str, b: str) -> None:
        """Undo a `shape` of the same nodes; data in transit arrives at once."""
        self._links.shape(a, b, AT_ONCE)
        for ends in self._ends(a, b):
            for end in ends:
                end.socket.hasten()

    def cut(self, a: str, b: str = ANY, *, both: bool = True) -> None:
        """Let nothing of a arrive at b and, with `both`, nothing of b at a, without errors, until `mend`."""
        self._links.cut(_ways(a, b, both))

    def mend(self, a: str, b: str = ANY, *, both: bool = True) -> None:
        """Undo a `cut` of the same nodes; data sent meanwhile arrives."""
        self._links.mend(_ways(a, b, both))
        self._look()

    def heal(self) -> None:
        """Remove all cuts, shapes and refusals; data in transit arrives at once."""
        self._links.heal()
        self._refusing.clear()
        for _, end in self._ends(ANY, ANY):
            end.socket.hasten()

    def refuse(self, node: str, refusing: bool = True) -> None:
        """Make a node refuse new connections, or accept them again; open ones stay."""
        if refusing:
            self._refusing[node] = None
        else:
            self._refusing.pop(node, None)

    def reset(self, a: str, b: str = ANY, *, both: bool = True) -> None:
        """Reset every connection between two nodes; data in transit to the notified ends is lost.

        Without `both`, only a is notified; b notices when it sends something.
        """
        for end, other in self._ends(a, b):
            end.socket.break_off()
            if both:
                other.socket.break_off()

    def freeze(self, node: str) -> None:
        """Stop the process (SIGSTOP): its tasks and timers are suspended; its connections stay."""
        self._frozen[node] = None
        self._hold()

    def thaw(self, node: str) -> None:
        """Continue the process (SIGCONT): overdue callbacks run now."""
        if node in self._frozen:
            del self._frozen[node]
            self._hold()

    def _hold(self) -> None:
        loop, frozen = asyncio.get_running_loop(), self._frozen
        assert isinstance(loop, VirtualLoop)
        loop.hold((lambda context: context.get(_NODE, "") in frozen) if frozen else None)

    def kill(self, node: str) -> None:
        """End the process: close its listeners, and its connections as a kernel does.

        That is with a FIN, or an RST if it left bytes unread, and RSTs for later data. Its own protocols are not
        notified; the caller must cancel its tasks.
        """
        self.thaw(node)
        self._ports.release_all(node)
        for end, _ in self._ends(node, ANY):
            end.die()

    def vanish(self, node: str) -> None:
        """Make the host vanish silently: its connections stay half open, and connection attempts get no answer."""
        self._vanished[node] = None
        for end, _ in self._ends(node, ANY):
            end.socket.silent = True
            end.die()

    def come_back(self, node: str) -> None:
        """Bring the vanished host back: nothing listens, and data on old connections is answered with RST."""
        self._vanished.pop(node, None)
        self._ports.release_all(node)
        for end, _ in self._ends(node, ANY):
            end.socket.come_back()

    def _ends(self, a: str, b: str) -> list[tuple[Transport, Transport]]:
        """For every open connection between a and b, a's end and the other one; both if a is b."""
        pairs = [pair for two in self._pairs.values() for pair in (two, two[::-1])]
        return [(end, other) for end, other in pairs if a in (ANY, end.node) and b in (ANY, other.node)]

    def _look(self) -> None:
        for end, _ in self._ends(ANY, ANY):
            end.socket.look()


def _ways(a: str, b: str, both: bool) -> tuple[tuple[str, str], ...]:
    return ((a, b), (b, a)) if both else ((a, b),)


def _refused(host: str, port: int) -> OSError:
    return OSError(errno.ECONNREFUSED, f"Connect call failed {(host, port)}")


def _check(options: dict[str, object]) -> None:
    """Raises ValueError for options that matter but are not simulated."""
    for option in ("ssl", "sock"):
        if options.get(option):
            raise ValueError(f"`{option}` is not simulated")
    if not options.get("start_serving", True):
        raise ValueError("listening later than binding is not simulated")
