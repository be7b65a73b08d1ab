"""Hedged requests: short, side-effect-free requests go to a second replica when the first one is late.

Dean and Barroso, "The Tail at Scale" (CACM 2013). The first response head wins; the other attempt is cancelled.
Hedges draw on the retry budget, and are sent only while the queue is empty.
"""

from typing import TYPE_CHECKING, Final

from forebay.core.model import Task
from forebay.core.resilience import Outcome, outcome_of
from forebay.core.routing import Route
from forebay.gateway.requests.relay import Relay
from forebay.gateway.tensor.answers import code_of, is_retryable
from forebay.net.client import CallError, Header
from forebay.wire.records import Attempt

if TYPE_CHECKING:
    from forebay.gateway.link import Link
    from forebay.gateway.scheduling.scheduler import Scheduler

_CHAT: Final = Task.CHAT  # looked up once: access to enum members is slow
HEDGED: Final = "hedged"
"""Outcome of an attempt that was cancelled because the other one won."""


class Hedge(Relay):
    """The second attempt of `first`, which is in flight at `link`. Once it has won, it only forwards to `first`."""

    def __init__(self, first: Relay, link: "Link") -> None:
        ticket, began = first.ticket, first.began
        super().__init__(
            first.scheduler, first.served, first.exchange, first.path, first.request_id, ticket=ticket, began=began
        )
        first.exchange.on_disconnect = first.client_gone
        self.first = first
        self.request = first.request
        self.routing = first.routing
        self.revision = first.revision or (link.revision if first.side is not None else "")
        self.queued_s = first.queued_s
        self.tried = (*first.tried, (link.id, link.generation))

    @property
    def yields(self) -> bool:
        """Urgent requests preempt the first attempt instead."""
        return False

    def waited(self, now: float) -> None:
        """Queue time is counted once, for the first attempt."""

    def swap(self) -> None:
        """Swap the attempts of this relay and `first`, so that `first` goes on with the one that won."""
        first = self.first
        for each, other in ((self, first), (first, self)):
            assert each.link is not None
            del each.link.attempts[each]
            each.link.attempts[other] = None
        self.link, first.link = first.link, self.link
        self.charge, first.charge = first.charge, self.charge
        self.mark, first.mark = first.mark, self.mark
        self.route, first.route = first.route, self.route
        self.since, first.since = first.since, self.since
        first.candidates, first.report_age_s, first.hit = self.candidates, self.report_age_s, self.hit
        self.swap_calls(first)
        first.tried = self.tried

    def replica_lost(self) -> None:
        """Its replica has not responded for too long: the first attempt continues alone."""
        self._failed("lost")

    def on_head(self, status: int, headers: list[Header]) -> None:
        first = self.first
        if is_retryable(status, headers) or status >= 500:
            first.scheduler.end_hedge(first, won=False, reason=str(status), outcome=outcome_of(code_of(status)))
            return
        first.scheduler.end_hedge(first, won=True)
        first.on_head(status, headers)

    def on_body(self, data: bytes) -> None:
        self.first.on_body(data)

    def on_error(self, error: CallError) -> None:
        self._failed(error.kind)

    def _failed(self, reason: str) -> None:
        self.first.scheduler.end_hedge(self.first, won=False, reason=reason, outcome=Outcome.FAILED)


def begin_hedge(scheduler: "Scheduler", relay: Relay) -> None:
    """Send a hedge, as the response is late, if a second replica has room and the retry budget allows it."""
    scheduler.watch_deadline(relay, scheduler.now())  # a request has one timer, which was the hedge's until now
    served, link = relay.served, relay.link
    if link is None or relay not in link.attempts or not relay.unanswered or served.waiting:
        return
    if relay.exchange.started:  # a replica is already streaming, and only this relay can resume that
        return
    hedge = Hedge(relay, link)
    choice = scheduler.choose(hedge)
    if isinstance(choice, Route) and scheduler.budget.allow(scheduler.now()):
        relay.hedge = hedge
        scheduler.send(hedge, choice)


def end_hedge(scheduler: "Scheduler", relay: Relay, won: bool, reason: str, outcome: Outcome) -> None:
    """Drop the first attempt if the hedge `won`, else the hedge; `reason` and `outcome` are the dropped one's."""
    hedge, now = relay.hedge, scheduler.now()
    assert hedge is not None
    relay.hedge = None
    relay.served.account.hedged("won" if won else "lost").inc()
    if won:
        hedge.swap()
    link = hedge.link
    assert link is not None
    if won:
        # of a chat model only token counts are hedged, which say nothing about its answers
        if reason == HEDGED and relay.served.routes.task is not _CHAT:
            link.breaker.brown_out.note_whole(now - hedge.since, now)  # it would have taken at least this long
    elif reason != HEDGED:
        link.broke_off(reason, now)
        relay.tried = (*relay.tried, (link.id, link.generation))
    relay.attempts += (Attempt(link.id, hedge.why, reason, now - hedge.since),)
    hedge.give_up()
    scheduler.end_attempt(hedge, outcome, now)
