"""The gateway's view of models and replicas: routes from the snapshot, load from the replicas themselves."""

from collections.abc import Collection, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from forebay.core.admission import LATELY_S, Band, PaceModel, RequestQueue, batch_max, batch_room
from forebay.core.errors import Code
from forebay.core.model import BlockNews, LoadReport, ModelRoutes, Policy, Replica, ReplicaState, Split, Task
from forebay.core.prefix.blocks import BLOCK_BYTES, flaw
from forebay.core.resilience import Breaker, pool_pace_s, pool_ttft_s
from forebay.core.routing import (
    CAPACITY_UNKNOWN,
    HOLD_S,
    LIVE,
    Meter,
    PrefixIndex,
    Pricing,
    ReplicaView,
    RoutingRequest,
    Source,
    effective_state,
    learned_room,
    room,
    share_of_room,
)
from forebay.core.routing.sessions import SessionHomes
from forebay.core.routing.speed import Lengths
from forebay.gateway.account import Account
from forebay.net.client import Pool
from forebay.wire import http1

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.rollout.mirroring import Mirror

STALL_S: Final = 2.0
"""An engine silent for this long although it has work stalls its streams."""
JUDGE_EVERY_S: Final = 1.0
FIGURE_MAX: Final = 2**40
"""No real figure of a load report exceeds this or is negative. Others are clamped: the rest may still be right."""
GOING: Final = (Code.DRAINING, Code.FENCED)
"""Error codes of a replica that is going away."""
RESTARTING: Final = (Code.ENGINE_FAILED, Code.ENGINE_STALLED)
"""Error codes of a replica whose engine process is being replaced."""
UNREACHABLE: Final = ReplicaState.STARTING
"""State of a replica that has not answered a load poll lately, or answered under another identity."""


BATCH: Final = Band.BATCH  # looked up once: access to enum members is slow
_CHAT: Final = Task.CHAT
_CPR: Final = Policy.CPR


class BandView(ReplicaView):
    """A replica as seen by the requests of one band: with an adjusted load or room."""

    __slots__ = ()

    def __init__(self, link: ReplicaView, load: int, room: int) -> None:
        self.id = link.id
        self.generation = link.generation
        self.state = link.state
        self.load = load
        self.room = room
        self.places = link.places
        self.last_used = link.last_used
        self.meter = link.meter


class Link(ReplicaView):
    """One replica at one generation: its connections, its load, its attempts in flight."""

    __slots__ = (
        "attempts",
        "awaited_at",
        "batch",
        "batch_max",
        "blocks_estimated",
        "blocks_seq",
        "breaker",
        "filled",
        "head_lines",
        "heard_at",
        "host",
        "lost_at",
        "mirrors",
        "model",
        "others",
        "pace",
        "planned",
        "pool",
        "port",
        "process",
        "reported",
        "retired",
        "revision",
        "stalled",
        "task",
    )

    def __init__(self, replica: Replica, model: str, task: Task, pool: Pool, meter: Meter) -> None:
        self.id = replica.id
        self.generation = replica.generation
        self.revision = replica.revision
        self.host = replica.host
        self.port = replica.port
        self.planned = replica.state
        self.model = model
        self.task = task
        self.pool = pool
        self.meter = meter
        self.breaker = Breaker()
        self.pace = PaceModel()
        self.process = ""
        """Id of the process behind the address; empty: unknown."""
        self.state = self.reported = UNREACHABLE
        self.load = 0
        self.others = 0
        self.room = 0
        self.places = 0
        self.filled = False
        """Whether its engine was seen full: it runs no more sequences than it does now."""
        self.awaited_at: float | None = None
        """Since when a request has been held for it, with none sent meanwhile; None: none is."""
        self.last_used = 0
        self.heard_at = 0.0
        """When its last load report was requested."""
        self.lost_at = -inf
        """When a request's connection last broke or could not be made. If no load report was requested and answered
        since, its process may be gone."""
        self.retired = False
        self.stalled = False
        self.blocks_seq: int | None = 0
        """The last prefix cache change applied, 0 if none; None: its reports are not trusted any more."""
        self.blocks_estimated = False
        self.attempts: dict[Relay, None] = {}
        self.batch: dict[Relay, None] = {}
        """Those that are batch work, newest last; without those found not to be preemptible."""
        self.batch_max = 1.0
        """The share of its slots that batch work may hold while there are urgent requests."""
        self.mirrors: dict[Mirror, None] = {}
        """Mirrored copies in flight, newest last. They do not count as load: any request may take the slot of one."""
        self.head_lines = http1.fields(
            (
                (b"x-forebay-replica", replica.id.encode()),
                (b"x-forebay-model", model.encode()),
                (b"x-forebay-model-revision", replica.revision.encode()),
            )
        )
        """Response header lines that identify it."""
        meter.weigh(replica.weight)

    @property
    def live(self) -> bool:
        """Whether it accepts requests."""
        return self.state in LIVE

    def plan(self, state: ReplicaState) -> None:
        """Apply the state that control has planned for it."""
        self.planned = state
        self.state = effective_state(state, self.reported)

    def apply_report(self, report: LoadReport, own: int) -> str:
        """Apply its load report; `own` attempts were in flight when it was requested. Returns the problem, or ""."""
        who = (report.replica, report.generation, report.model)
        if who != (self.id, self.generation, self.model):
            self.mark_unreachable()
            return f"expected {self.id} generation {self.generation} of {self.model}, found {who}"
        self.reported = report.state
        self.state = effective_state(self.planned, report.state)
        self.places = _figure(report.capacity) or CAPACITY_UNKNOWN
        self.room = room(self.places, self.task)
        self.others = max(0, _figure(report.in_flight) - max(own, len(self.attempts)) - len(self.mirrors))
        self.load = len(self.attempts) + self.others
        return ""

    def replaced(self, report: LoadReport) -> bool:
        """Whether another process now answers at its address under its identity: the attempts in flight are lost."""
        if (report.replica, report.generation) != (self.id, self.generation):
            return False
        before, self.process = self.process, report.process or self.process
        return before not in ("", self.process)

    def learn_room(self, report: LoadReport, gateways: int, now: float) -> None:
        """See whether its engine is full; if so, each gateway takes its share of the slots that it really has."""
        kv_tokens = _figure(report.kv_total_tokens)
        learned = learned_room(
            self.filled, self.room, self.places, running=_figure(report.running), waiting=_figure(report.waiting),
            kv_share=_figure(report.kv_used_tokens) / kv_tokens if kv_tokens else 0.0,
        )  # fmt: skip
        self.filled = learned is not None
        if learned is not None:
            self.room = share_of_room(learned, self.load, gateways)
            self.meter.strained = self.awaited_at is None or now - self.awaited_at <= HOLD_S

    def drains(self) -> None:
        """It rejected a request because it is shutting down, which is newer than its last load report."""
        self.planned = ReplicaState.DRAINING
        self.state = effective_state(self.planned, self.reported)

    def broke_off(self, reason: str, now: float) -> None:
        """An attempt failed; `reason` is the kind of the call error, or the error code in the response."""
        if reason == "connect" or reason in RESTARTING:
            self.mark_unreachable()
        if reason in ("connect", "lost") or reason in RESTARTING:
            self.lost_at = now
        elif reason in GOING:
            self.drains()

    def mark_unreachable(self) -> None:
        """Nothing is known of it: it gets no request until it answers again."""
        self.state = self.reported = UNREACHABLE
        self.others = 0
        self.load = len(self.attempts)

    def retire(self) -> None:
        """Control has removed it; attempts in flight may finish."""
        self.retired = True
        self.mark_unreachable()
        if not self.attempts:
            self.pool.close()

    def begin_attempt(self, relay: "Relay", turn: int) -> None:
        """An attempt starts."""
        self.attempts[relay] = None
        if relay.ticket.band == BATCH:
            self.batch[relay] = None
        self.load += 1
        self.last_used = turn
        self.awaited_at = None

    def end_attempt(self, relay: "Relay") -> bool:
        """An attempt has ended. False if there was none."""
        if relay not in self.attempts:
            return False
        del self.attempts[relay]
        if self.batch:
            self.batch.pop(relay, None)
        self.load -= 1
        if self.retired and not self.attempts:
            self.pool.close()
        return True


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
        self.lengths = Lengths()
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
        """Sum over all ended requests of their time in the gateway, in seconds."""
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
        stalled, link.stalled = link.stalled, report.stalled_s > STALL_S
        if link.stalled and not stalled:
            link.breaker.brown_out.note_stall(now)
        link.heard_at = asked_at
        link.meter.strained = False
        if not problem and self.routes.policy is _CPR and link.task is _CHAT:
            link.learn_room(report, self.pricing.gateways, now)
        if not problem and not link.retired:
            lengths, kv_tokens = self.lengths, _figure(report.kv_total_tokens)
            # an engine reports waiting sequences, not their tokens: each is assumed to have a typical prompt
            queue_tokens = round(_figure(report.waiting) * lengths.prompt_tokens)
            kv_share = _figure(report.kv_used_tokens) / kv_tokens if kv_tokens else 0.0
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
        self.homes.look(self.links)
        self.pricing.refresh([link.meter for link in live], now)
        if now - self._judged_at >= JUDGE_EVERY_S:
            self._judged_at = now
            for link in live:
                link.breaker.brown_out.note_paces(link.meter.paces_s, now)
                link.meter.paces_s.clear()
            pool = [link.breaker.brown_out for link in live]
            ttft_s, pace_s = pool_ttft_s(pool, now), pool_pace_s(pool, now)
            for each in pool:
                each.judge(ttft_s, pace_s, now)
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
    def ready(self) -> bool:
        """Whether any replica accepts requests."""
        return any(link.live for link in self.links)

    @property
    def serves(self) -> bool:
        """Whether requests are answered, possibly only after a replica has started on demand."""
        return self.routes.on_demand or self.ready


def _figure(reported: int) -> int:
    return min(max(0, reported), FIGURE_MAX)
