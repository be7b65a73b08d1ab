"""LMetric (Zhang et al., OSDI 2026): queued prefill tokens times requests."""

from collections.abc import Sequence
from random import Random

from forebay.sim.rivals.history import Unread
from forebay.sim.rivals.values import Rival, RoutedRequest, State, drawn, held, hit_tokens, live


class LMetric(Rival):
    """The lowest (queued prefill tokens + the request's uncached tokens) · (requests there + 1).

    Queues come from the router's own bookkeeping, which is complete with the paper's single router; with `reported`,
    from the replicas' last reports.
    """

    __slots__ = ("_reported", "_unread")

    def __init__(self, *, reported: bool = False) -> None:
        self._reported = reported
        self._unread = Unread()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        return drawn(alive, [self._score(request, replicas[at]) for at in alive], rng)

    def _score(self, request: RoutedRequest, replica: State) -> int:
        report = replica.report
        queue = report.waiting_tokens if self._reported else self._unread.tokens(replica.id)
        requests = report.waiting + report.running if self._reported else replica.in_flight
        new = request.tokens - hit_tokens(request, held(request.blocks, replica.cached))
        return (queue + max(1, new)) * (requests + 1)  # at least one token is prefilled, so that loads still count

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        hit = hit_tokens(request, held(request.blocks, replica.cached))
        self._unread.charge(request, replica, request.tokens - hit)

    def first_token(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        self._unread.release(request, replica)

    done = first_token
