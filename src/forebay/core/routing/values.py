"""Inputs and results of replica selection: replica views, the request, the decision."""

from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from forebay.core.errors import Code
from forebay.core.model import ReplicaState
from forebay.core.routing.meter import Meter


class ReplicaView:
    """One replica as its gateway sees it now. Not a protocol: this is the most frequently read object of routing."""

    __slots__ = ("generation", "id", "last_used", "load", "meter", "places", "room", "state")

    id: str
    """The slot."""
    generation: int
    """Which start of the slot."""
    state: ReplicaState
    """Only READY and DEGRADED replicas get requests."""
    load: int
    """Requests at the replica: this gateway's, and those of other gateways as far as reported."""
    places: int
    """How many requests run there at once."""
    room: int
    """Load at which it is full: some requests more than `places` may queue in its engine."""
    last_used: int
    """Sequence number of its last use; grows with every use of any replica."""
    meter: Meter
    """Its queued work, speed and trust."""


class Rng(Protocol):
    """The part of random.Random that choices need."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to below `stop`."""


class Weights(NamedTuple):
    """Weights of a request's own delays, relative to the delays that it causes to others (which count 1)."""

    ttft: float
    tpot: float
    work: float
    """Weight of its prefill time where it delays no other request."""


INTERACTIVE: Final = Weights(1.0, 0.15, 0.0)
"""In proportion to typical objectives: seconds for the first token, about a tenth of a second for each further
one."""
BATCH: Final = Weights(0.1, 0.015, 1.0)
"""Latency hardly matters: it goes where it causes the least new work."""


class RoutingRequest:
    """What routing knows about a request."""

    __slots__ = (
        "block_tokens",
        "blocks",
        "held",
        "home",
        "key",
        "output_tokens",
        "patient",
        "seed",
        "stays",
        "tokens",
        "ttft_budget_s",
        "weights",
    )

    def __init__(
        self,
        seed: int,
        tokens: int,
        output_tokens: float = 0.0,
        blocks: tuple[int, ...] = (),
        block_tokens: int = 0,
        *,
        key: int = 0,
        stays: bool = False,
        weights: Weights = INTERACTIVE,
        ttft_budget_s: float | None = None,
    ) -> None:
        self.seed = seed
        """Derived from the request id, so that every gateway, and a replay, draws alike."""
        self.tokens = tokens
        """Estimated prompt length, tokens."""
        self.output_tokens = output_tokens
        """Expected response length, tokens."""
        self.blocks = blocks
        """Chained 64-bit hashes of the prompt's blocks, in order; empty if unknown."""
        self.block_tokens = block_tokens
        """Tokens per block."""
        self.key = key
        """Hash of the session or routing key; 0 if there is none."""
        self.stays = stays
        """It must go to its session's replica, or wait for it."""
        self.home = ""
        """The slot of its session; empty: none is known."""
        self.weights = weights
        self.ttft_budget_s = ttft_budget_s
        """TTFT budget: the first token should arrive within this time."""
        self.patient = True
        """Whether it may wait for the best replica while others have room. Set by the caller, like `held`."""
        self.held = False
        """Whether it has waited for the best replica."""


class Why(StrEnum):
    """Reason of a choice."""

    NEXT = "next in turn"
    FEWEST = "fewest requests"
    FEWER_OF_TWO = "fewer requests of two at random"
    ONLY = "the only replica that can take it now"
    LONGEST_PREFIX = "holds the longest part of the prompt"
    ITS_KEY = "its key belongs there"
    ITS_SESSION = "its session is there"
    NEW_SESSION = "its session belongs there"
    KEY_OVERFLOW = "where its key belongs is too loaded"
    CHEAPEST = "lowest cost"
    DRAWN = "drawn among those of the lowest cost"
    LATE = "lowest cost, but not in time"
    HELD = "lowest cost, after a wait for the replica where it was lowest"
    BEST_FULL = "the replica of the lowest cost is full, and worth a wait"
    FULL = "every replica is full"
    SESSION_FULL = "the replica of its session is full"
    NONE_READY = "no replica is ready"
    ALL_TRIED = "every live replica was tried"


class Score:
    """The cost of a candidate, term by term; `total_s` is weighted, the terms are not.

    One is made per request and candidate, so it is not a NamedTuple, which is slow to construct.
    """

    __slots__ = (
        "at",
        "decode_s",
        "handicap",
        "hit_tokens",
        "kv_s",
        "load",
        "prefill_s",
        "price_s",
        "queue_s",
        "total_s",
    )

    def __init__(
        self,
        at: int,
        load: int,
        *,
        queue_s: float,
        prefill_s: float,
        decode_s: float,
        price_s: float,
        kv_s: float,
        handicap: float,
        total_s: float,
        hit_tokens: int,
    ) -> None:
        self.at = at
        self.load = load
        self.queue_s = queue_s
        """Until the prompts ahead of it are prefilled."""
        self.prefill_s = prefill_s
        """Of its own uncached prompt."""
        self.decode_s = decode_s
        """Slowdown of the whole response by the requests that run there."""
        self.price_s = price_s
        """Delay that its work causes to others."""
        self.kv_s = kv_s
        """Penalty for used KV memory."""
        self.handicap = handicap
        """Factor on the total for a replica that is slow or has just come back; at least 1."""
        self.total_s = total_s
        self.hit_tokens = hit_tokens
        """Prompt tokens that the prefix index predicts to be cached; the terms discount this by the trust."""


class Route:
    """Send the request to `replicas[at]`."""

    __slots__ = ("at", "hit_tokens", "terms", "why")

    def __init__(self, at: int, why: Why, hit_tokens: int = 0, terms: list[Score] | None = None) -> None:
        self.at = at
        self.why = why
        self.hit_tokens = hit_tokens
        """Prompt tokens that the prefix index predicts to be cached there; 0 if the index was not consulted."""
        self.terms = terms
        """The scores of all candidates; None if they were not scored."""


class Wait(NamedTuple):
    """No replica can take the request now, or waiting is better, but one may later."""

    why: Why
    at: int = -1
    """The replica it waits for; -1: any."""


class Shed(NamedTuple):
    """Reject the request."""

    code: Code
    why: Why
    retry_after_s: int
