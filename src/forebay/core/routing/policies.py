"""Policies that count requests, follow a key or a prefix. `pool` holds the indexes of at least two replicas.

A request at a replica that can do less than its usual work, that is slow, or that has just come back counts more,
which taking turns follows, too. Only the home of a session has no regard to it.
"""

import math
from collections.abc import Sequence
from typing import Final

from forebay.core.prefix.index import PrefixIndex
from forebay.core.routing.values import Ask, Rng, Route, View, Why

LOAD_BOUND: Final = 1.25
"""How far above the mean load a replica may be and still get a request for the sake of its key or prefix."""
HIT_SHARE_MIN: Final = 0.5
"""Less of the prompt than this is not worth an uneven load."""
WORD: Final = 0xFFFF_FFFF_FFFF_FFFF


def round_robin(replicas: Sequence[View], pool: Sequence[int]) -> Route:
    """The one that was not used for longest, in turns of its own: who counts four times has every fourth one."""
    turn = 1 + max([replica.last_used for replica in replicas])

    def rank(at: int) -> tuple[float, str]:
        replica = replicas[at]
        return (replica.last_used - turn) / _times(replica), replica.id

    return Route(min(pool, key=rank), Why.NEXT)


def least_requests(replicas: Sequence[View], pool: Sequence[int]) -> Route:
    """The one with the fewest requests."""
    return Route(_idlest(replicas, pool), Why.FEWEST)


def p2c(replicas: Sequence[View], pool: Sequence[int], rng: Rng) -> Route:
    """The one with fewer requests of two at random: gateways that see the same loads do not all choose alike."""
    if len(pool) == 2:
        return least_requests(replicas, pool)
    first = rng.randrange(len(pool))
    second = rng.randrange(len(pool) - 1)
    return Route(_idlest(replicas, (pool[first], pool[second + (second >= first)])), Why.FEWER_OF_TWO)


def consistent_hash(replicas: Sequence[View], pool: Sequence[int], ask: Ask) -> Route:
    """The same replica for the same key, unless that is loaded far above the mean and runs all that it can at once.

    Rendezvous hashing (Thaler and Ravishankar 1998): the highest hash of key and replica wins, so one replica more or
    less moves only its own keys and no ring is kept. The bound on the load is that of consistent hashing with bounded
    loads (Mirrokni, Thorup and Zadimoghaddam 2018). Without a key, what begins alike belongs together.
    """
    key = mix(ask.key or (ask.blocks[0] if ask.blocks else ask.seed))
    order = sorted(pool, key=lambda at: mix(key ^ replicas[at].meter.name), reverse=True)
    load_max = math.ceil(LOAD_BOUND * (sum([_load(replicas[at]) for at in pool]) + 1) / len(pool))
    # the least loaded is always below the bound
    at = next(at for at in order if _load(replicas[at]) < max(load_max, replicas[at].places))
    return Route(at, Why.ITS_KEY if at == order[0] else Why.KEY_OVERFLOW)


def home(replicas: Sequence[View], live: Sequence[int], key: int) -> int:
    """Where a key belongs: another one of `live` only if that is gone. Rendezvous hashing, as above."""
    scattered = mix(key)
    return max(live, key=lambda at: mix(scattered ^ replicas[at].meter.name))


def prefix_affinity(replicas: Sequence[View], pool: Sequence[int], ask: Ask, index: PrefixIndex) -> Route:
    """The one that holds the longest part of the prompt, if that is most of it and its load is near the mean."""
    masks = [replicas[at].meter.mask for at in pool]
    depths = index.depths(ask.blocks, masks)
    longest = max(depths)
    hit_tokens = min(longest * ask.block_tokens, ask.tokens)
    if hit_tokens > HIT_SHARE_MIN * ask.tokens:
        at = _idlest(replicas, [at for at, depth in zip(pool, depths, strict=True) if depth == longest])
        if _load(replicas[at]) <= LOAD_BOUND * sum([_load(replicas[at]) for at in pool]) / len(pool) + 1:
            return Route(at, Why.LONGEST_PREFIX, hit_tokens)
    at = _idlest(replicas, pool)
    return Route(at, Why.FEWEST, min(depths[pool.index(at)] * ask.block_tokens, ask.tokens))


def mix(number: int) -> int:
    """A number scattered over 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    number = (number + 0x9E37_79B9_7F4A_7C15) & WORD
    number = (number ^ number >> 30) * 0xBF58_476D_1CE4_E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D0_49BB_1331_11EB & WORD
    return number ^ number >> 31


def _idlest(replicas: Sequence[View], pool: Sequence[int]) -> int:
    def cost(at: int) -> tuple[float, int, str]:
        replica = replicas[at]
        return (replica.load + 1) * _times(replica), replica.last_used, replica.id

    return min(pool, key=cost)


def _load(replica: View) -> float:
    return replica.load * _times(replica)


def _times(replica: View) -> float:
    """How many times a request there counts."""
    meter = replica.meter
    return meter.burden * meter.handicap
