"""What a choice is made from and what it answers: replicas as a gateway sees them, the request, the verdict."""

from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from forebay.core.errors import Code
from forebay.core.model import ReplicaState
from forebay.core.routing.meter import Meter


class View:
    """One replica as its gateway sees it now. No protocol: choices look at nothing more often."""

    __slots__ = ("generation", "id", "last_used", "load", "meter", "places", "room", "state")

    id: str
    """The slot."""
    generation: int
    """Which start of the slot."""
    state: ReplicaState
    """Only READY and DEGRADED replicas get requests."""
    load: int
    """Requests at the replica: this gateway's, and those of others as far as reported."""
    places: int
    """How many requests run there at once."""
    room: int
    """Load at which it is full: some more wait in its engine."""
    last_used: int
    """A number that grows with every use of any replica."""
    meter: Meter
    """Its work, speed and trust."""


class Rng(Protocol):
    """The part of random.Random that choices need."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to below `stop`."""


class Weights(NamedTuple):
    """How much a request minds its own delays, against the delays that it makes for others (which count 1)."""

    ttft: float
    tpot: float
    work: float
    """How much the time that its prompt takes counts where it delays nobody."""


INTERACTIVE: Final = Weights(1.0, 0.15, 0.0)
"""As promises go: some seconds to the first token, and about a tenth of one for each of the hundreds after it."""
BATCH: Final = Weights(0.1, 0.015, 1.0)
"""Nobody waits for it: it goes where it makes the least new work."""


class Ask:
    """What routing knows of a request."""

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
        """From the request's id, so that every gateway, and a replay, draws alike."""
        self.tokens = tokens
        """Estimated length of the prompt."""
        self.output_tokens = output_tokens
        """Expected length of the answer."""
        self.blocks = blocks
        """Chained 64-bit hashes of the prompt's blocks, the first block first; empty if they are not known."""
        self.block_tokens = block_tokens
        self.key = key
        """Hash of the session or routing key; 0 if there is none."""
        self.stays = stays
        """It goes where its key belongs, or waits."""
        self.home = ""
        """The slot where those with its key have gone so far; empty: none has, as far as is known."""
        self.weights = weights
        self.ttft_budget_s = ttft_budget_s
        """The first token should come within this time."""
        self.patient = True
        """Whether it may wait for the best replica while others have room. For whoever asks to set, like `held`."""
        self.held = False
        """Whether it has done so."""


class Why(StrEnum):
    """Reason of a choice."""

    NEXT = "next in turn"
    FEWEST = "fewest requests"
    FEWER_OF_TWO = "fewer requests of two at random"
    ONLY = "no other one can take it now"
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
    """What a candidate would cost, term by term; `total_s` is weighted, the terms are not.

    There are as many for each request as it has candidates, so this is no tuple with names: those are slow to make.
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
        """Until the prompts ahead of it are done."""
        self.prefill_s = prefill_s
        self.decode_s = decode_s
        """What the requests that run there take from the answer's pace, over the whole answer."""
        self.price_s = price_s
        """The work that it makes for others."""
        self.kv_s = kv_s
        self.handicap = handicap
        self.total_s = total_s
        self.hit_tokens = hit_tokens
        """How much of the prompt the prefix index says it holds; the terms believe it as far as it is trusted."""


class Route:
    """Send it to `replicas[at]`."""

    __slots__ = ("at", "hit_tokens", "terms", "why")

    def __init__(self, at: int, why: Why, hit_tokens: int = 0, terms: list[Score] | None = None) -> None:
        self.at = at
        self.why = why
        self.hit_tokens = hit_tokens
        """How much of the prompt the prefix index says it holds there; 0 if the index was not asked."""
        self.terms = terms
        """All candidates; None if they were not scored."""


class Wait(NamedTuple):
    """No replica can take it now, or none should, but one may later."""

    why: Why
    at: int = -1
    """Which one it waits for; -1: any."""


class Shed(NamedTuple):
    """Refuse it."""

    code: Code
    why: Why
    retry_after_s: int
