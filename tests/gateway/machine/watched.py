"""The gateway's own accounts, which object at once when something is done that must not be."""

import io
from collections import Counter, defaultdict
from zlib import crc32

from tests.gateway.machine.api_formats import HEDGEABLE

from forebay.core.admission import Band, RequestQueue, Ticket, crowded
from forebay.core.errors import Code, Refusal
from forebay.core.model import ModelRoutes, Policy, RecordsSpec, Replica
from forebay.core.resilience import Breaker, BreakerLimits, Outcome, admissible
from forebay.core.routing import Route, Shed, Wait, Why
from forebay.gateway.account import Account
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.fleet import Served
from forebay.gateway.link import RESTARTING, Link
from forebay.gateway.records.facts import Facts
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.requests.relay import Relay
from forebay.gateway.scheduling.choosing import TOKENIZING_MAX
from forebay.gateway.scheduling.hedging import HEDGED, Hedge
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.net.client import Pool
from forebay.obs import log

SHED = frozenset(
    {Code.QUEUE_FULL, Code.OVERLOADED, Code.NO_REPLICA, Code.REPLICA_LOST, Code.ENGINE_FAILED, Code.REQUEST_FAILED}
)
"""Refusals that say there is nowhere to go."""
RETRIES_MAX = 3
LIMITS = BreakerLimits(failures_max=2, open_s=2.0, open_s_max=8.0, probes_max=1, successes_min=2)
"""Breakers that move often."""


class WatchedLink(Link):
    """A link that takes no attempt that it should not get."""

    __slots__ = ("failed", "served")
    failed: dict[Relay, None]
    served: "WatchedServed"

    def begin_attempt(self, relay: Relay, turn: int) -> None:
        assert self.live, f"{self.id} is {self.state}"
        assert not self.retired
        assert self in self.served.links
        room = self.room + TOKENIZING_MAX if slotless(relay) else self.room
        assert self.load < room, f"{self.id} is full: {self.load} of {room}"
        assert (self.id, self.generation) not in relay.tried, "it was tried there already"
        assert relay.exchange.started or relay not in self.failed, "it has failed there before"
        assert relay.revision in ("", self.revision), "another revision was asked for"
        assert relay.served is self.served
        assert relay not in self.served.waiting._entries, "it waits and is sent"
        self._has_a_place_for(relay)
        self._is_admissible(relay)
        self._is_where_its_session_is(relay)
        if isinstance(relay, Hedge):
            self._is_a_second_attempt(relay, relay.first)
        self.served.sent[relay.request_id.decode()] += 1
        super().begin_attempt(relay, turn)

    def end_attempt(self, relay: Relay) -> bool:
        had = super().end_attempt(relay)
        scheduler = relay.scheduler
        assert isinstance(scheduler, WatchedScheduler)
        if had and relay.preempted and relay not in scheduler.gave_way:
            scheduler.gave_way[relay] = None
            assert self.live, f"an attempt at {self.id} gave way, where nobody can go"
            assert self.load - len(self.batch) < self.room, f"an attempt at {self.id} gave way, which makes no room"
        return had

    def _has_a_place_for(self, relay: Relay) -> None:
        """No request queues behind batch work in an engine, and batch work leaves places to others."""
        band = relay.ticket.band
        if slotless(relay):
            return
        if band is Band.BATCH:
            seen = self.served.seen_by(band, relay.scheduler.now())[self.served.links.index(self)]
            assert seen.load < seen.room, f"batch work takes what {self.id} keeps for others"
        elif not isinstance(relay, Hedge):
            assert not crowded(self.load, self.places, len(self.batch), len(self.batch)), "it goes behind batch work"

    def _is_admissible(self, relay: Relay) -> None:
        """Whoever is shut gets requests only where nobody else could take them."""
        allowed = admissible_of(self.served, relay.scheduler.now())
        others = [link for link in allowed if could_take(link, relay)]
        assert self in allowed or not others, f"{self.id} is shut, {[link.id for link in others]} is open"

    def _is_where_its_session_is(self, relay: Relay) -> None:
        """A session stays in its slot for as long as that can take it, and may move when its replica is not live.

        Once that was lost, a hash says where it is: seen here by the first request that could have gone to anybody.
        """
        if relay.routing is None or not relay.routing.stays:
            return
        live = [link for link in self.served.links if link.live]
        links = [link for link in live if could_serve(link, relay)]
        allowed = admissible_of(self.served, relay.scheduler.now())
        might = [link.id for link in [x for x in links if x in allowed] or links]
        slots, lost = self.served.slots, self.served.homes.lost
        slot, losses = slots.get(relay.routing.key, ("", 0))
        gone = lost(slot) != losses
        assert gone or slot not in might or slot == self.id, "a session has left its replica"
        if len(might) == len(live) if gone else all(link.id != slot for link in live):
            slots[relay.routing.key] = self.id, lost(self.id)

    def _is_a_second_attempt(self, hedge: Hedge, first: Relay) -> None:
        """Only what is late, short, and was answered by nobody is sent twice, to two replicas, where nobody waits."""
        assert first.path.encode() in HEDGEABLE
        assert first.link is not None
        assert first.link is not self
        assert first in first.link.attempts
        assert first.hedge is hedge
        assert first.unanswered
        assert first.hedge_after_s > 0.0, "its model is never hedged"
        assert first.scheduler.now() - first.since > first.hedge_after_s - 1e-6
        assert not self.served.waiting
        scheduler = first.scheduler
        assert isinstance(scheduler, WatchedScheduler)
        scheduler.hedges_begun += 1


def could_serve(link: Link, relay: Relay) -> bool:
    """Whether it is one of those that may have this request, full or not."""
    return (link.id, link.generation) not in relay.tried and relay.revision in ("", link.revision)


def slotless(relay: Relay) -> bool:
    """Whether this is the first attempt of a request that needs only the tokenizer, which is sent past the queue."""
    return not ENDPOINTS[relay.path.encode()].runs and not relay.attempts and not isinstance(relay, Hedge)


def admissible_of(served: Served, now: float) -> list[Link]:
    """Those of the live links whose breakers let requests through."""
    live = [link for link in served.links if link.live]
    return [live[at] for at in admissible([link.breaker for link in live], now)]


def could_take(link: WatchedLink, relay: Relay) -> bool:
    """Whether the link is open to this request, as far as counts go."""
    seen = link.served.seen_by(relay.ticket.band, relay.scheduler.now())[link.served.links.index(link)]
    return link.live and seen.load < seen.room and could_serve(link, relay)


def nobody_waits_in_vain(scheduler: "WatchedScheduler", served: Served, now: float) -> None:
    """Nobody waits who could go somewhere, but for the best replica, or behind somebody who does.

    A place where an attempt has just failed is offered at the next tick.
    """
    if served in scheduler.unsettled or served.pumping:
        return
    held = set()
    for relay in served.waiting:
        routing = relay.routing
        kind = relay.revision, relay.tried, routing.key if routing is not None and routing.stays else 0
        if kind in held:
            continue
        choice = scheduler.choose(relay)
        if isinstance(choice, Wait) and choice.why is Why.BEST_FULL:
            assert routing is not None
            assert routing.held
            assert routing.patient
            assert not relay.exchange.started
            assert served.routes.policy is Policy.CPR
            held.add(kind)
            continue
        assert not isinstance(choice, Route), f"{relay.request_id!r} waits and could go"
        if not relay.revision and not (routing is not None and routing.stays):
            open_to = [link.id for link in served.links if could_take(link, relay) and link.breaker.admits(now)]
            assert not open_to, f"{relay.request_id!r} waits, {open_to} could take it"


class WatchedRoom(RequestQueue[Relay]):
    """A request queue that adds up what tenants are charged."""

    __slots__ = ("charged",)

    def __init__(self, size_max: int, timeout_s: float) -> None:
        super().__init__(size_max, timeout_s)
        self.charged: dict[str, float] = defaultdict(float)

    def served(self, ticket: Ticket) -> None:
        self.charged[ticket.tenant] += ticket.work_tokens
        super().served(ticket)

    def charge(self, ticket: Ticket, delta_tokens: float) -> None:
        self.charged[ticket.tenant] += delta_tokens
        super().charge(ticket, delta_tokens)


class WatchedServed(Served):
    """A model whose links are all remembered, and how often each request was sent."""

    __slots__ = ("all_links", "sent", "slots")

    def __init__(self, routes: ModelRoutes, account: Account) -> None:
        super().__init__(routes, account)
        self.all_links: list[WatchedLink] = []
        self.sent: Counter[str] = Counter()
        self.slots: dict[int, tuple[str, int]] = {}
        """Where sessions were sent, by their keys, and the last loss of that slot until then."""
        self.waiting = WatchedRoom(routes.queue_max, routes.queue_timeout_s)

    def link(self, replica: Replica, pool: Pool) -> Link:
        plain = super().link(replica, pool)
        link = WatchedLink(replica, self.routes.name, self.routes.task, pool, plain.meter)
        link.served = self
        link.failed = {}
        link.breaker = Breaker(LIMITS)
        self.all_links.append(link)
        return link


class WatchedScheduler(Scheduler):
    """A scheduler that turns nobody away who could be served."""

    gave_way: dict[Relay, None]
    answering: dict[str, Link | None]
    """Where the last attempt of requests that have ended went to."""
    hedges: Counter[tuple[str, ...]]
    hedges_begun = 0
    unsettled: dict[Served, None]
    """Where an attempt was given up since it was last seen who could go."""

    def pump(self, served: Served) -> None:
        super().pump(served)
        if not served.pumping:
            self.unsettled.pop(served, None)

    def end_request(self, relay: Relay, code: str, status: int, now: float) -> None:
        waits = relay.link is None or relay not in relay.link.attempts
        narrow = relay.band is Band.BATCH or relay.revision  # others may have no use for what was freed just now
        if narrow and relay.served in self.unsettled:
            waits = False
        if relay.chosen is not None and relay.chosen.before and relay.chosen.before[0] not in self.served:
            waits = False  # a fallback model has refused it, and its own model has been removed
        if code in SHED and waits and now < relay.ticket.deadline and relay.retries < RETRIES_MAX:
            assert not isinstance(self.choose(relay), Route), f"{code}, though there is a place for it"
        super().end_request(relay, code, status, now)
        self.answering[relay.request_id.decode()] = relay.link
        nobody_waits_in_vain(self, relay.served, now)

    def place(self, relay: Relay) -> Route | Wait | Shed:
        if relay.session:  # made by chance, but a run must be like the next
            assert relay.routing is not None
            relay.session = relay.request_id
            relay.routing.key = crc32(relay.session)
        if relay.ticket.band < Band.BATCH and relay.served.running[Band.BATCH]:
            self.unsettled[relay.served] = None
        return super().place(relay)

    def attempt_failed(self, relay: Relay, reason: str, problem: Refusal) -> None:
        assert isinstance(relay.link, WatchedLink)
        if reason not in RESTARTING or any(each.outcome in RESTARTING for each in relay.attempts):
            relay.link.failed[relay] = None  # else its next engine may have it
        self.unsettled[relay.served] = None
        super().attempt_failed(relay, reason, problem)

    def end_hedge(self, relay: Relay, *, won: bool, reason: str = HEDGED, outcome: Outcome = Outcome.NEUTRAL) -> None:
        hedge, first_at = relay.hedge, relay.link
        assert hedge is not None
        second_at, calls = hedge.link, [hedge._call, relay._call]
        assert first_at is not None
        assert second_at is not None
        others = len(first_at.attempts) + len(second_at.attempts) - 2
        self.unsettled[relay.served] = None
        super().end_hedge(relay, won=won, reason=reason, outcome=outcome)
        self.hedges[relay.served.routes.name, "won" if won else "lost"] += 1
        assert relay.hedge is None
        assert relay.link is (second_at if won else first_at)
        assert len(first_at.attempts) + len(second_at.attempts) == others + (relay in relay.link.attempts)
        assert hedge not in first_at.attempts
        assert hedge not in second_at.attempts
        dropped = calls[won]
        assert hedge._call is None
        assert dropped is None or dropped.sink is None, "the loser is not cancelled"
        assert dropped is None or dropped.connection is None


class Notes(Recorder):
    """Keeps the facts of finished requests; only the ledger behind them is real."""

    def __init__(self) -> None:
        super().__init__(RecordsSpec("", decisions=False, audit=False), "gateway-0", log.configure(io.StringIO()))
        self.all: list[Facts] = []

    def finished(self, facts: Facts) -> None:
        self.all.append(facts)
        super().finished(facts)
