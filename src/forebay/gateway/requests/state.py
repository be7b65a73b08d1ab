"""The state of a request: what came with it, where it may go, its attempts, and what is known of its response."""

from typing import TYPE_CHECKING, Final

from msgspec import Raw

from forebay.core.admission import Band, Ticket
from forebay.core.dispatch import Chosen
from forebay.core.errors import Refusal
from forebay.core.routing import Charge, Route, RoutingRequest
from forebay.gateway.account import UNREPORTED, Tokens
from forebay.net.server import Exchange
from forebay.wire.records import Attempt
from forebay.wire.transcript import Transcript

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from forebay.gateway.fleet import Served
    from forebay.gateway.link import Link
    from forebay.gateway.rollout.arms import Side
    from forebay.gateway.scheduling.hedging import Hedge
    from forebay.gateway.tenancy import Admitted

WAITING: Final = 0  # assigned one by one: only then does mypyc treat them as constants
WHOLE: Final = 1
EVENTS: Final = 2
BYTES: Final = 3
RETRY: Final = 4
FAILED: Final = 5
"""How the response is handled: not started, buffered, as SSE events, as bytes because it is too large, discarded
because the request will be retried, discarded because it does not continue the broken stream."""


class RequestState:
    """The state of one request; `Relay` adds what happens to it."""

    # defaults that most requests never change stay on the class: fewer assignments per request

    # the request
    request = b""
    """What is sent to replicas, head and body."""
    prompt_bytes = 1
    text_bytes = 1
    """Bytes of the prompt that token estimates are based on."""
    choices = 1
    limit = 0  # max tokens over all choices; 0: the client set no limit
    streams = False
    plain = False
    """Responses are not SSE and need not be JSON: they are passed through."""
    once = False
    """It must not be sent to a replica twice."""
    mid_sequence = False
    """One replica has the state that it needs: it does not begin its sequence."""
    bound = False
    """No fallback model can serve it, whatever the condition of its own."""
    slotless = False
    """It has not been queued, and needs no slot of an engine: only the tokenizer."""
    session = b""
    """A new session id, sent to the client as a cookie."""
    client = ""
    admitted: "Admitted | None" = None

    # where it may go
    routing: RoutingRequest | None = None
    chosen: Chosen | None = None
    asked = ""
    """The model name in the request, if a different model serves it."""
    revision = ""
    """Only replicas of this revision may serve it; empty: any."""
    side: "Side | None" = None
    hedge_after_s = 0.0
    """Delay after which a hedge is sent to a second replica, in seconds; 0: never."""

    # its attempts
    link: "Link | None" = None
    route: Route | None = None
    charge: Charge | None = None
    since = 0.0
    """When the last attempt began, on the loop's clock."""
    mark = 0
    """The breaker's mark of the last attempt."""
    hedge: "Hedge | None" = None
    timer: "TimerHandle | None" = None
    queued_s = 0.0
    """Total time spent queued before its attempts, in seconds."""
    joined = 0.0
    """When it was passed on to the model that serves it now, on the loop's clock; 0: it came to that one at once."""
    free_at = 0.0
    """When its last attempt or its last wait ended, on the loop's clock; 0: neither has."""
    attempts: tuple[Attempt, ...] = ()
    tried: tuple[tuple[str, int], ...] = ()
    """Replicas, as (id, generation), that its next attempt avoids."""
    retries = 0
    resumes = 0
    stuck = 0
    """Resumes in a row without an event in between."""
    preempted = False
    problem: Refusal | None = None
    """Why its last attempt failed."""
    instead: tuple[Refusal, int] | None = None
    """The error it would have got if no fallback model had taken over, and its retry-after in seconds."""
    candidates: tuple[Raw, int] | None = None
    """For the request log: the candidates of the last choice, and how many more there were."""
    report_age_s = 0.0
    """For the request log: age of the chosen replica's load report at that time."""
    hit = ""
    """For the request log: how the cached part of the prompt is known, a `Source`; empty if there is none."""

    # its response
    mode = WAITING
    status = 0
    body: list[bytes]
    """What is buffered of it; set in the modes `WHOLE` and `RETRY`."""
    transcript: Transcript | None = None
    first_at = 0.0
    """When its first event was sent, on the loop's clock; 0: none has been."""
    usage: Tokens = UNREPORTED
    begun: Tokens = UNREPORTED
    """The token counts that a worker reported when its stream began."""

    def __init__(
        self, served: "Served", exchange: Exchange, path: str, request_id: bytes, *, ticket: Ticket, began: float
    ) -> None:
        self.served = served
        self.exchange = exchange
        self.path = path
        self.request_id = request_id
        self.ticket = ticket
        self.began = began

    @property
    def band(self) -> Band:
        """Its priority band."""
        return self.ticket.band

    @property
    def yields(self) -> bool:
        """Whether its attempt may be preempted by a more urgent request: see `core.admission.RunningTicket`."""
        if self.once:  # the replica may have run it already
            return False
        if not self.exchange.started:
            return self.ticket.band == Band.BATCH or not self.preempted
        return self.ticket.band == Band.BATCH and self.transcript is not None and self.transcript.resumable

    @property
    def arrived(self) -> float:
        """When it came to the model that serves it now."""
        return self.joined or self.began

    @property
    def parallel(self) -> int:
        """How many of its choices its replica generates at once."""
        return max(1, min(self.choices, self.link.places)) if self.link is not None else 1

    @property
    def unanswered(self) -> bool:
        """Whether no response head has come for the current attempt."""
        return self.mode == WAITING

    @property
    def refused(self) -> bool:
        """Whether the replica rejected the last attempt, which says nothing about the request itself."""
        return self.mode == RETRY

    @property
    def why(self) -> str:
        """Why the last attempt went to its replica."""
        if self.route is None:
            return ""
        return self.route.why if self.side is None else self.route.why + self.side.note

    @property
    def as_stream(self) -> bool:
        """Whether its response is a stream."""
        return self.transcript is not None

    @property
    def events(self) -> tuple[int, int]:
        """Events sent to the client, and how many of them had text."""
        return (self.transcript.events, self.transcript.content_events) if self.transcript is not None else (0, 0)

    @property
    def reported(self) -> tuple[int, int, int] | None:
        """Prompt, completion and cached tokens as the worker counted them; None if it reported none."""
        prompt, completion, cached = self.usage
        known = prompt or completion or (self.plain and cached is not None)  # input that is not text has no tokens
        return (prompt, completion, cached or 0) if known else None

    def extend_wait(self, until: float) -> None:
        """Extend its queue timeout after an attempt; past the client's deadline only if the response has begun."""
        ticket = self.ticket
        self.ticket = ticket.until(max(ticket.deadline, until if self.exchange.started else min(until, ticket.last)))

    def waited(self, now: float) -> None:
        """A wait is over: the request is sent, or never will be."""
        wait_s = now - (self.free_at or self.began)
        self.free_at = now
        self.queued_s += wait_s
        self.served.account.queue_wait.observe(wait_s)
