"""What a choice is made from and what it answers: replicas as a gateway sees them, the request, the verdict."""

from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from forebay.core.errors import Code
from forebay.core.model import ReplicaState
from forebay.core.routing.meter import Meter


class View(Protocol):
    """One replica as its gateway sees it now."""

    @property
    def id(self) -> str:
        """The slot."""

    @property
    def generation(self) -> int:
        """Which start of the slot."""

    @property
    def state(self) -> ReplicaState:
        """Only READY and DEGRADED replicas get requests."""

    @property
    def load(self) -> int:
        """Requests at the replica: this gateway's, and those of others as far as reported."""

    @property
    def room(self) -> int:
        """Load at which it is full."""

    @property
    def last_used(self) -> int:
        """A number that grows with every use of any replica."""

    @property
    def meter(self) -> Meter:
        """Its work, speed and trust; read only where a request comes with an `Ask`."""


class Rng(Protocol):
    """The part of random.Random that choices need."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to below `stop`."""


class Weights(NamedTuple):
    """How much a request minds its own delays, against the work that it makes for others (which counts 1)."""

    ttft: float
    tpot: float


INTERACTIVE: Final = Weights(1.0, 1.0)
BATCH: Final = Weights(0.1, 0.1)
"""Nobody waits for it: it goes where it makes the least new work."""


class Ask(NamedTuple):
    """What routing knows of a request."""

    seed: int
    """From the request's id, so that every gateway, and a replay, draws alike."""
    tokens: int
    """Estimated length of the prompt."""
    output_tokens: float = 0.0
    """Expected length of the answer."""
    blocks: tuple[int, ...] = ()
    """Chained 64-bit hashes of the prompt's blocks, the first block first; empty if they are not known."""
    block_tokens: int = 0
    key: int = 0
    """Hash of the session or routing key; 0 if there is none."""
    stays: bool = False
    """It goes where its key belongs, or waits."""
    weights: Weights = INTERACTIVE
    ttft_budget_s: float | None = None
    """The first token should come within this time."""


class Why(StrEnum):
    """Reason of a choice."""

    NEXT = "next in turn"
    FEWEST = "fewest requests"
    FEWER_OF_TWO = "fewer requests of two at random"
    ONLY = "the only one with room"
    LONGEST_PREFIX = "holds the longest part of the prompt"
    ITS_KEY = "its key belongs there"
    ITS_SESSION = "its session is there"
    KEY_OVERFLOW = "where its key belongs is too loaded"
    CHEAPEST = "lowest cost"
    DRAWN = "drawn among those of the lowest cost"
    LATE = "lowest cost, but none can answer in time"
    FULL = "every replica is full"
    SESSION_FULL = "the replica of its session is full"
    NONE_READY = "no replica is ready"
    ALL_TRIED = "every live replica was tried"


class Score(NamedTuple):
    """What a candidate would cost, term by term; `total_s` is weighted, the terms are not."""

    at: int
    queue_s: float
    """Until the prompts ahead of it are done."""
    prefill_s: float
    decode_s: float
    """What the requests that run there take from the answer's pace, over the whole answer."""
    price_s: float
    """The work that it makes for others."""
    kv_s: float
    handicap: float
    total_s: float
    hit_tokens: int
    """How much of the prompt the prefix index says it holds; the terms believe it as far as it is trusted."""


class Route(NamedTuple):
    """Send it to `replicas[at]`."""

    at: int
    why: Why
    hit_tokens: int = 0
    """How much of the prompt the prefix index says it holds there; 0 if the index was not asked."""
    terms: tuple[Score, ...] = ()
    """All candidates, if they were scored."""


class Wait(NamedTuple):
    """No replica can take it now, but one may later."""

    why: Why


class Shed(NamedTuple):
    """Refuse it."""

    code: Code
    why: Why
    retry_after_s: int
