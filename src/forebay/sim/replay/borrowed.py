"""Another system's routing policy in place of ours: what it sees, and when it learns of results.

Everything else stays the same. Replicas accept all requests: these systems leave queueing to the engines.
"""

from collections.abc import Callable, Collection, Sequence
from random import Random

from forebay.core.errors import Code
from forebay.core.model import Policy
from forebay.core.routing import Pricing, ReplicaView, Rng, Route, RoutingRequest, Shed, Wait, Why
from forebay.sim.engine import Job, Replica
from forebay.sim.replay.node import Node
from forebay.sim.rivals.table import Row
from forebay.sim.rivals.values import Report, RoutedRequest, State


class _Truth:
    """The true state of an engine, for the oracle."""

    def __init__(self, engine: Replica, now: Callable[[], float]) -> None:
        self._engine = engine
        self._now = now

    def first_token_s(self, request: RoutedRequest) -> float:
        return self._engine.first_token_s(request.tokens, request.blocks, self._now())

    def read_s(self, request: RoutedRequest) -> float:
        return self._engine.read_s(request.tokens, request.blocks)

    def token_s(self) -> float:
        return self._engine.token_s()


class Borrowed:
    """One gateway's rival policy. `asked`, of `tenant`, is the request to be routed next."""

    def __init__(self, row: Row, jobs: dict[int, Job], now: Callable[[], float], rng: Random):
        self._rival = row.make()
        self._jobs = jobs
        self._now = now
        self._rng = rng
        self._events = row.events
        self._cached: list[set[int]] = []
        self._seqs: list[int] = []
        self._states: list[State] = []
        self._sent: dict[int, tuple[RoutedRequest, State]] = {}
        self.asked: Job | None = None
        self.tenant = ""

    def choose(
        self,
        policy: Policy,
        replicas: Sequence[ReplicaView],
        tried: Collection[tuple[str, int]],
        rng: Rng,
        *,
        request: RoutingRequest | None = None,
        pricing: Pricing | None = None,
    ) -> Route | Wait | Shed:
        """Replaces `core.routing.choose`."""
        job = self.asked
        if job is None:
            return Shed(Code.NO_REPLICA, Why.ALL_TRIED, retry_after_s=1)
        seen = RoutedRequest(
            job.id, job.prompt_tokens, job.blocks, tenant=self.tenant, output_tokens=job.output_tokens
        )
        now = self._now()
        at = self._rival.choose(seen, self._states, now, self._rng)
        state = self._states[at]
        state.in_flight += 1
        self._rival.sent(seen, state, now)
        self._sent[job.id] = seen, state
        return Route(at, Why.CHEAPEST)

    def link(self, node: Node) -> None:
        """Add a replica; it is never removed."""
        cached: set[int] = set()
        self._cached.append(cached)
        self._seqs.append(0)
        self._states.append(State(node.id, cached=cached, truth=_Truth(node.engine, self._now)))

    def hear(self, at: int, node: Node, now: float) -> None:
        """A replica's report arrives."""
        engine = node.engine
        self._states[at].report = Report(
            now, engine.waiting, engine.running, engine.waiting_tokens,
            engine.kv_used_tokens / engine.kv_total_tokens, engine.kv_total_tokens,
        )  # fmt: skip
        if not self._events:
            return
        news = node.news(self._seqs[at])
        if news is None:
            return
        self._seqs[at] = news.seq
        cached = self._cached[at]
        if news.reset:
            cached.clear()
        cached.difference_update(news.removed)
        cached.update(news.stored)

    def began(self, id: int) -> None:
        """The first token of a request has arrived."""
        if id in self._sent:
            self._rival.first_token(*self._sent[id], self._now())

    def ended(self, id: int) -> None:
        """A request has ended."""
        sent = self._sent.pop(id, None)
        if sent is not None:
            seen, state = sent
            state.in_flight -= 1
            self._rival.done(seen, state, self._now())
