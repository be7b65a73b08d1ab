"""The replicas of one model as a gateway sees them: routes from the snapshot, links to replicas, the queue."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from forebay.core.admission import LATELY_S, Band, RequestQueue, batch_max, batch_room
from forebay.core.model import BlockNews, LoadReport, ModelRoutes, Policy, Replica, Split, Task
from forebay.core.prefix.blocks import BLOCK_BYTES, flaw
from forebay.core.resilience import State, pool_pace_s, pool_ttft_s, pool_whole_s
from forebay.core.routing import Meter, PrefixIndex, Pricing, ReplicaView, RoutingRequest, Source
from forebay.core.routing.sessions import SessionHomes
from forebay.core.routing.speed import Lengths
from forebay.gateway.account import Account
from forebay.gateway.link import BATCH, BandView, Link, figure
from forebay.net.client import Pool

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay

STALL_S: Final = 2.0
"""An engine silent for this long although it has work stalls its streams."""
JUDGE_EVERY_S: Final = 1.0
"""How often replicas are compared for slowness."""
_CHAT: Final = Task.CHAT
_CPR: Final = Policy.CPR
_CLOSED: Final = State.CLOSED


class Served:
    """One model: its routes, its replicas sorted by id, its queue."""

    __slots__ = (
        "_judged_at",
        "account",
        "freed",
        "homes",
        "leaving",
        "lengths",
        "links",
        "pricing",
        "pumping",
        "routes",
        "running",
        "split",
        "stay_s",
        "troubled",
        "urgent_at",
        "waiting",
    )

    def __init__(self, routes: ModelRoutes, account: Account) -> None:
        self.routes = routes
        self.split: Split | None = routes.split
        """None: all replicas have the same revision."""
        self.account = account
        self.links: list[Link] = []
        self.leaving: list[Link] = []
        """Replicas that control has removed, with attempts in flight."""
        self.pricing = Pricing(PrefixIndex())
        self.lengths = Lengths() if routes.task is _CHAT else Lengths(0.0)
        self.running = [0] * len(Band)
        """Attempts in flight, by band."""
        self.urgent_at = float("-inf")
        """When there last was a request in flight other than batch work."""
        self.troubled = False
        """Whether any replica's breaker may not be closed."""
        self.freed = False
        """Whether an attempt has ended since the queue was last pumped."""
        self.pumping = False
        """Whether the queue is being pumped now: guards against recursion."""
        self.stay_s = 0.0
        """Sum over all requests that have ended, or went to another model, of their time here, in seconds."""
        self.homes = SessionHomes()
        self._judged_at = 0.0
        self.waiting: RequestQueue[Relay] = RequestQueue(routes.queue_max, routes.queue_timeout_s)

    def link(self, replica: Replica, pool: Pool) -> Link:
        """A new link to a replica."""
        who = (replica.id, replica.generation)
        for relay in (*self.waiting, *(each for link in self.links for each in link.attempts)):
            if who in relay.tried:  # another process: control without state counts generations from 1 again
                relay.tried = tuple(each for each in relay.tried if each != who)
        meter = Meter(replica.id, self.pricing.index.join())
        return Link(replica, self.routes.name, self.routes.task, pool, meter)

    def seen_by(self, band: Band, now: float) -> Sequence[ReplicaView]:
        """The replicas as seen by a request of this band while there is batch work.

        An urgent request ignores batch work, which it can preempt; for batch work the slots reserved for urgent
        requests are excluded, if there were any recently.
        """
        if band < BATCH:
            loads, rooms = [x.load - len(x.batch) for x in self.links], [x.room for x in self.links]
        elif now - self.urgent_at >= LATELY_S:
            return self.links
        else:
            loads = [x.load for x in self.links]
            rooms = [min(x.room, batch_room(x.places, len(x.batch), x.batch_max)) for x in self.links]
        return [BandView(x, load, room) for x, load, room in zip(self.links, loads, rooms, strict=True)]

    def full_for_urgent(self) -> list[tuple[str, int]]:
        """Replicas, as (id, generation), where an urgent request would queue even after preempting batch work."""
        return [(x.id, x.generation) for x in self.links if x.load - len(x.batch) >= x.places]

    def apply_report(self, link: Link, report: LoadReport, own: int, asked_at: float, now: float) -> str:
        """Apply a load report; `own` attempts were in flight when it was requested. Returns the problem, or ""."""
        was_live = link.live
        if not was_live and link.lost_at >= asked_at:
            return ""  # it may have been sent before the process died
        problem = link.apply_report(report, own)
        if link.live and not was_live:
            link.breaker.ready(now)
            link.meter.handicap = link.breaker.handicap(now)  # until `refresh` compares it with the others
        stalled, link.stalled = link.stalled, report.stalled_s > STALL_S
        if link.stalled and not stalled:
            link.breaker.brown_out.note_stall(now)
        link.heard_at = asked_at
        link.meter.strained = False
        if not problem and self.routes.policy is _CPR and link.task is _CHAT:
            link.learn_room(report, self.pricing.gateways, now)
        if not problem and not link.retired:
            lengths, kv_tokens = self.lengths, figure(report.kv_total_tokens)
            # an engine reports waiting sequences, not their tokens: each is assumed to have a typical prompt
            queue_tokens = round(figure(report.waiting) * lengths.prompt_tokens)
            kv_share = figure(report.kv_used_tokens) / kv_tokens if kv_tokens else 0.0
            link.meter.report(queue_tokens, kv_share, self.pricing.gateways)
            if kv_tokens:
                self.pricing.index.resize(link.meter.mask, kv_tokens // lengths.tokens(BLOCK_BYTES))
        return problem

    def apply_blocks(self, link: Link, news: BlockNews, now: float) -> str:
        """Apply prefix cache changes. Returns the problem, or ""; after one its reports are never trusted again."""
        if link.retired or link.blocks_seq is None:
            return ""
        problem = flaw(news, link.blocks_seq)
        if problem:
            self.doubt_blocks(link)
            return problem
        link.blocks_seq, link.blocks_estimated = news.seq, news.estimated
        self.pricing.index.tell(link.meter.mask, news.stored, news.removed, now, reset=news.reset)
        return ""

    def doubt_lost(self, tried: Collection[tuple[str, int]]) -> bool:
        """Whether any replica that a request `tried`, as (id, generation), may be dead without that being known yet.

        Such replicas get nothing until it is: a request that breaks connections must not be mistaken for dead
        replicas.
        """
        doubtful = [x for x in self.links if x.live and x.lost_at > x.heard_at and (x.id, x.generation) in tried]
        for link in doubtful:
            link.mark_unreachable()
        return bool(doubtful)

    def doubt_blocks(self, link: Link) -> None:
        """Stop trusting its prefix cache reports: only what this gateway sends there is counted."""
        link.blocks_seq = None
        if not link.retired:
            self.pricing.index.leave(link.meter.mask)
            link.meter.mask = self.pricing.index.join()

    def source(self, link: Link, routing: RoutingRequest | None, hit_tokens: int) -> str:
        """How it is known that this part of a prompt is cached there, a `Source`; empty if nothing is."""
        if not hit_tokens or routing is None or not routing.blocks:
            return ""
        depth = min(len(routing.blocks), max(1, hit_tokens // routing.block_tokens))
        if not self.pricing.index.told(link.meter.mask, routing.blocks[depth - 1]):
            return Source.PREDICTED
        return Source.ESTIMATED if link.blocks_estimated else Source.EXACT

    def refresh(self, now: float) -> None:
        """Update what depends on time: speeds, prices, handicaps, slow replicas. Call this a few times a second."""
        live = [link for link in self.links if link.live]
        self.homes.detect_losses(self.links)
        self.troubled = any(link.breaker.state is not _CLOSED for link in self.links)
        self.pricing.refresh([link.meter for link in live], now)
        if now - self._judged_at >= JUDGE_EVERY_S:
            self._judged_at = now
            for link in live:
                link.breaker.brown_out.note_paces(link.meter.paces_s, now)
                link.meter.paces_s.clear()
            pool = [link.breaker.brown_out for link in live]
            ttft_s, pace_s, whole_s = pool_ttft_s(pool, now), pool_pace_s(pool, now), pool_whole_s(pool, now)
            for each in pool:
                each.judge(ttft_s, pace_s, whole_s, now)
            if self.running[BATCH]:
                about = now - self.urgent_at < LATELY_S
                for link in live:
                    urgent, most = link.load - len(link.batch), link.batch_max if about else 0.0
                    link.batch_max = batch_max(link.places, link.pace.line(now), urgent, most)
        handicaps = [link.breaker.handicap(now) for link in live]
        for link, handicap in zip(live, handicaps, strict=True):
            link.meter.handicap = handicap / min(handicaps)  # relative: if all just started, none is behind
        if any(self.running[:BATCH]):
            self.urgent_at = now

    def mark_unreachable(self, link: Link) -> None:
        """Its last report is too old."""
        link.mark_unreachable()
        link.meter.report(None, link.meter.kv_share, self.pricing.gateways)

    def unlink(self, link: Link) -> None:
        """Control has removed it; attempts in flight may finish."""
        link.retire()
        self.pricing.index.leave(link.meter.mask)
        self.leaving = [each for each in (*self.leaving, link) if each.attempts]

    def update(self, routes: ModelRoutes) -> None:
        """Apply new routes."""
        self.routes = routes
        self.split = routes.split
        self.waiting.size_max = routes.queue_max
        self.waiting.timeout_s = routes.queue_timeout_s

    @property
    def in_flight(self) -> int:
        """Attempts in flight, including those at removed replicas."""
        return sum(len(link.attempts) for link in (*self.links, *self.leaving))

    @property
    def resume_text_bytes(self) -> int:
        """Text kept of unfinished streams, for the replicas that would resume them."""
        asked = chain(self.waiting.waiting(), *(link.attempts for link in (*self.links, *self.leaving)))
        return sum(relay.transcript.bytes_held for relay in asked if relay.transcript is not None)

    @property
    def ready(self) -> bool:
        """Whether any replica accepts requests."""
        return any(link.live for link in self.links)

    @property
    def serves(self) -> bool:
        """Whether requests are answered, possibly only after a replica has started on demand."""
        return self.routes.on_demand or self.ready
