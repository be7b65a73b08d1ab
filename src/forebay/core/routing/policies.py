"""Policies that count requests or follow a key or prefix. `pool` holds the indexes of at least two replicas.

Load is weighted: a request counts more at a replica that is slow, has reduced throughput or has just come back. Round
robin respects this too; only the home of a session does not.
"""

import math
from collections.abc import Sequence
from typing import Final

from forebay.core.prefix.index import PrefixIndex
from forebay.core.routing.values import ReplicaView, Rng, Route, RoutingRequest, Why

LOAD_BOUND: Final = 1.25
"""How far above the mean load a replica may be and still get a request because of its key or prefix."""
HIT_SHARE_MIN: Final = 0.5
"""A smaller share of the prompt is not worth an uneven load."""
WORD: Final = 0xFFFF_FFFF_FFFF_FFFF


def round_robin(replicas: Sequence[ReplicaView], pool: Sequence[int]) -> Route:
    """The least recently used one, weighted: a replica whose requests count four times gets every fourth turn."""
    turn = 1 + max([replica.last_used for replica in replicas])

    def rank(at: int) -> tuple[float, str]:
        replica = replicas[at]
        return (replica.last_used - turn) / _weight(replica), replica.id

    return Route(min(pool, key=rank), Why.NEXT)


def least_requests(replicas: Sequence[ReplicaView], pool: Sequence[int]) -> Route:
    """The one with the fewest requests."""
    return Route(_least_loaded(replicas, pool), Why.FEWEST)


def p2c(replicas: Sequence[ReplicaView], pool: Sequence[int], rng: Rng) -> Route:
    """The less loaded of two random replicas, so that gateways that see the same loads do not all choose alike."""
    if len(pool) == 2:
        return least_requests(replicas, pool)
    first = rng.randrange(len(pool))
    second = rng.randrange(len(pool) - 1)
    return Route(_least_loaded(replicas, (pool[first], pool[second + (second >= first)])), Why.FEWER_OF_TWO)


def consistent_hash(
    replicas: Sequence[ReplicaView], pool: Sequence[int], full: Sequence[int], request: RoutingRequest
) -> Route:
    """The same replica for the same key, unless that is `full`, or loaded far above the mean with all slots used.

    Rendezvous hashing (Thaler and Ravishankar 1998): the highest hash of key and replica wins, so adding or removing
    a replica moves only its own keys, and no ring is kept. The load bound is that of consistent hashing with bounded
    loads (Mirrokni, Thorup and Zadimoghaddam 2018). Without a key, prompts with the same first block go together.
    """
    key = mix(request.key or (request.blocks[0] if request.blocks else request.seed))

    def rank(at: int) -> int:
        return mix(key ^ replicas[at].meter.name)

    order = sorted(pool, key=rank, reverse=True)
    load_max = math.ceil(LOAD_BOUND * (sum([_load(replicas[at]) for at in pool]) + 1) / len(pool))
    # the least loaded is always below the bound
    at = next(at for at in order if _load(replicas[at]) < max(load_max, replicas[at].places))
    return Route(at, Why.ITS_KEY if at == max([order[0], *full], key=rank) else Why.KEY_OVERFLOW)


def home(replicas: Sequence[ReplicaView], live: Sequence[int], key: int) -> int:
    """The home of a key among `live`; it changes only if that replica leaves. Rendezvous hashing, as above."""
    scattered = mix(key)
    return max(live, key=lambda at: mix(scattered ^ replicas[at].meter.name))


def prefix_affinity(
    replicas: Sequence[ReplicaView], pool: Sequence[int], request: RoutingRequest, index: PrefixIndex
) -> Route:
    """The one that has the longest prefix of the prompt cached, if that is most of it and its load is near the
    mean."""
    masks = [replicas[at].meter.mask for at in pool]
    depths = index.depths(request.blocks, masks)
    longest = max(depths)
    hit_tokens = min(longest * request.block_tokens, request.tokens)
    if hit_tokens > HIT_SHARE_MIN * request.tokens:
        at = _least_loaded(replicas, [at for at, depth in zip(pool, depths, strict=True) if depth == longest])
        if _load(replicas[at]) <= LOAD_BOUND * sum([_load(replicas[at]) for at in pool]) / len(pool) + 1:
            return Route(at, Why.LONGEST_PREFIX, hit_tokens)
    at = _least_loaded(replicas, pool)
    return Route(at, Why.FEWEST, min(depths[pool.index(at)] * request.block_tokens, request.tokens))


def mix(number: int) -> int:
    """A 64-bit hash of a number: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    number = (number + 0x9E37_79B9_7F4A_7C15) & WORD
    number = (number ^ number >> 30) * 0xBF58_476D_1CE4_E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D0_49BB_1331_11EB & WORD
    return number ^ number >> 31


def _least_loaded(replicas: Sequence[ReplicaView], pool: Sequence[int]) -> int:
    def cost(at: int) -> tuple[float, int, str]:
        replica = replicas[at]
        return (replica.load + 1) * _weight(replica), replica.last_used, replica.id

    return min(pool, key=cost)


def _load(replica: ReplicaView) -> float:
    return replica.load * _weight(replica)


def _weight(replica: ReplicaView) -> float:
    """How much one request counts there; 1 in normal service."""
    meter = replica.meter
    return meter.burden * meter.handicap
