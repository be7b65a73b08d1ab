"""Hedged requests: what is short and has no side effects is sent to a second replica when the first one is late.

Dean and Barroso, "The Tail at Scale" (CACM 2013). The first head decides; the other attempt is cancelled. Hedges draw
on the budget of retries, and go only where nobody waits.
"""

from typing import TYPE_CHECKING, Final

from forebay.core.resilience import Outcome
from forebay.core.routing import Route
from forebay.gateway.relay import Relay
from forebay.gateway.tensor.answers import turned_away
from forebay.net.client import CallError, Header
from forebay.wire.records import Attempt

if TYPE_CHECKING:
    from forebay.gateway.fleet import Link
    from forebay.gateway.gateway import Gateway

HEDGED: Final = "hedged"
"""Outcome of an attempt that was not needed any more."""


class Hedge(Relay):
    """The second attempt of `first`, which is under way at `link`. After it has won, it only hands on."""

    def __init__(self, first: Relay, link: "Link") -> None:
        ticket, began = first.ticket, first.began
        super().__init__(
            first.gateway, first.served, first.exchange, first.path, first.request_id, ticket=ticket, began=began
        )
        first.exchange.on_disconnect = first.client_gone
        self.first = first
        self.request = first.request
        self.ask = first.ask
        self.revision = first.revision or (link.revision if first.side is not None else "")
        self.queued_s = first.queued_s
        self.tried = (*first.tried, (link.id, link.generation))

    @property
    def yields(self) -> bool:
        """An urgent request takes the place of the first attempt."""
        return False

    def waited(self, now: float) -> None:
        """The request has waited once, for its first attempt."""

    def change_places(self) -> None:
        """This attempt becomes that of `first`, and the other way round."""
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
        self.trade_call(first)
        first.tried = self.tried

    def replica_lost(self) -> None:
        """Its replica has been silent for too long: the first attempt goes on alone."""
        self._failed("lost")

    def on_head(self, status: int, headers: list[Header]) -> None:
        first = self.first
        if turned_away(status, headers) or status >= 500:
            outcome = Outcome.NEUTRAL if status == 503 else Outcome.FAILED
            first.gateway.hedged(first, won=False, reason=str(status), outcome=outcome)
            return
        first.gateway.hedged(first, won=True)
        first.on_head(status, headers)

    def on_body(self, data: bytes) -> None:
        self.first.on_body(data)

    def on_error(self, error: CallError) -> None:
        self._failed(error.kind)

    def _failed(self, reason: str) -> None:
        self.first.gateway.hedged(self.first, won=False, reason=reason, outcome=Outcome.FAILED)


def begin_hedge(gateway: "Gateway", relay: Relay) -> None:
    """Its answer is late: let another replica work on it too, if one is idle and the budget allows it."""
    served, link = relay.served, relay.link
    if link is None or relay not in link.attempts or not relay.unanswered or served.waiting:
        return
    if relay.exchange.started:  # a replica has answered with a stream, which only this relay can go on with
        return
    hedge = Hedge(relay, link)
    choice = gateway.choose(hedge)
    if isinstance(choice, Route) and gateway.budget.allow(gateway.now()):
        relay.hedge = hedge
        gateway.send(hedge, choice)


def end_hedge(gateway: "Gateway", relay: Relay, won: bool, reason: str, outcome: Outcome) -> None:
    """Drop the first attempt if the hedge has `won`, else the hedge; `reason` and `outcome` are the dropped one's."""
    hedge, now = relay.hedge, gateway.now()
    assert hedge is not None
    relay.hedge = None
    relay.served.account.hedged("won" if won else "lost").inc()
    if won:
        hedge.change_places()
    link = hedge.link
    assert link is not None
    if won:  # it would have taken at least so long
        link.breaker.brown_out.note_ttft(now - hedge.since, now)
    elif reason != HEDGED:
        relay.tried = (*relay.tried, (link.id, link.generation))
    relay.attempts += (Attempt(link.id, hedge.why, reason, now - hedge.since),)
    hedge.give_up()
    gateway.take_back(hedge, outcome, now)
