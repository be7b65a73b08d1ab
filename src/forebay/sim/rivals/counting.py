"""Policies that count requests or hash a key, as in common load balancers."""

import math
from collections.abc import Sequence
from random import Random
from typing import Final
from zlib import crc32

from forebay.core.routing.policies import mix
from forebay.sim.rivals.values import Rival, RoutedRequest, State, drawn, live

LOAD_FACTOR: Final = 1.25


class AnyReplica(Rival):
    """A random one."""

    __slots__ = ()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        return rng.choice(live(replicas))


class RoundRobin(Rival):
    """The next one in turn."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        self._turn += 1
        return alive[self._turn % len(alive)]


class LeastRequests(Rival):
    """The one with the fewest requests of this gateway; ties at random."""

    __slots__ = ()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        return drawn(alive, [replicas[at].in_flight for at in alive], rng)


class PowerOfTwo(Rival):
    """The one with fewer requests of this gateway, of two at random."""

    __slots__ = ()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        pair = rng.sample(alive, 2) if len(alive) > 1 else alive
        return min(pair, key=lambda at: replicas[at].in_flight)


class BoundedHash(Rival):
    """Consistent hashing with bounded loads: a key goes to the first replica in its order that is below the bound.

    The bound is that of Mirrokni, Thorup and Zadimoghaddam: ceil(factor · (requests + 1) / replicas). Rendezvous
    hashing orders the replicas, equivalent to a ring with very many virtual nodes. The key is that of the prompt's
    first `key_blocks` blocks; with 0 it is the tenant.

    `to_least` is the rule of SMG's `prefix_hash`: the key's own replica if it has at most factor · (requests + 1) /
    replicas, else the least loaded one.
    """

    __slots__ = ("_factor", "_key_blocks", "_names", "_to_least")

    def __init__(self, key_blocks: int, *, factor: float = LOAD_FACTOR, to_least: bool = False) -> None:
        self._key_blocks = key_blocks
        self._factor = factor
        self._to_least = to_least
        self._names: dict[str, int] = {}

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        key = self._key(request)
        bound = self._factor * (sum([replicas[at].in_flight for at in alive]) + 1) / len(alive)
        if self._to_least:
            own = max(alive, key=lambda at: mix(key ^ self._name(replicas[at].id)))
            return own if replicas[own].in_flight <= bound else min(alive, key=lambda at: replicas[at].in_flight)
        order = sorted(alive, key=lambda at: mix(key ^ self._name(replicas[at].id)), reverse=True)
        load_max = math.ceil(bound)
        return next(at for at in order if replicas[at].in_flight < load_max)  # the least loaded is always below

    def _key(self, request: RoutedRequest) -> int:
        blocks = request.blocks[: self._key_blocks]
        if blocks:
            return mix(blocks[-1])
        if request.tenant and not self._key_blocks:
            return mix(crc32(request.tenant.encode()))
        return mix(request.id)

    def _name(self, id: str) -> int:
        name = self._names.get(id)
        if name is None:
            name = self._names[id] = mix(crc32(id.encode()))
        return name
