"""What the gateway knows of models and replicas: routes from the snapshot, load from the replicas themselves."""

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
    Ask,
    Meter,
    PrefixIndex,
    Pricing,
    Source,
    View,
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
    from forebay.gateway.relay import Relay
    from forebay.gateway.rollout.mirroring import Mirror

STALL_S: Final = 2.0
"""An engine that owes a sign of life for so long makes its streams stall."""
JUDGE_EVERY_S: Final = 1.0
FIGURE_MAX: Final = 2**40
"""No true figure of a load report is larger, and none is below zero. What is, is cut: the rest may still be true."""
GOING: Final = (Code.DRAINING, Code.FENCED)
"""What replicas answer that end."""
RESTARTING: Final = (Code.ENGINE_FAILED, Code.ENGINE_STALLED)
"""What replicas answer whose engine process is being replaced."""
UNHEARD: Final = ReplicaState.STARTING
"""State of a replica that has not answered a load poll lately, or answered as another one."""


BATCH: Final = Band.BATCH  # looked up once: members of an enum are slow to get at
_CHAT: Final = Task.CHAT
_CPR: Final = Policy.CPR


class Seen(View):
    """A replica as it looks to requests that share it by band: with another load or room."""

    __slots__ = ()

    def __init__(self, link: View, load: int, room: int) -> None:
        self.id = link.id
        self.generation = link.generation
        self.state = link.state
        self.load = load
        self.room = room
        self.places = link.places
        self.last_used = link.last_used
        self.meter = link.meter


class Link(View):
    """One start of one replica: its connections, its load, the attempts under way."""

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
        """Which process answers there; empty: nobody has said."""
        self.state = self.reported = UNHEARD
        self.load = 0
        self.others = 0
        self.room = 0
        self.places = 0
        self.filled = False
        """Whether its engine has shown that it holds no more than it runs."""
        self.awaited_at: float | None = None
        """Since when somebody waits for it, and nobody was sent."""
        self.last_used = 0
        self.heard_at = 0.0
        """When its last load report was asked for."""
        self.lost_at = -inf
        """When a connection of a request last broke, or was not made. Its process may be gone if nothing was heard
        that was asked for since."""
        self.retired = False
        self.stalled = False
        self.blocks_seq: int | None = 0
        """The last change of its prefix cache that is known, 0 if none is; None: it is not believed any more."""
        self.blocks_estimated = False
        self.attempts: dict[Relay, None] = {}
        self.batch: dict[Relay, None] = {}
        """Those of them that are batch work, the newest last; without any that was found unable to step aside."""
        self.batch_max = 1.0
        """How many may be while urgent requests are about."""
        self.mirrors: dict[Mirror, None] = {}
        """Copies under way, the newest last. They are no load: any request may have the place of one."""
        self.head_lines = http1.fields(
            (
                (b"x-forebay-replica", replica.id.encode()),
                (b"x-forebay-model", model.encode()),
                (b"x-forebay-model-revision", replica.revision.encode()),
            )
        )
        """What the head of every answer says of it."""
        meter.weigh(replica.weight)

    @property
    def live(self) -> bool:
        """Whether requests may go there."""
        return self.state in LIVE

    def plan(self, state: ReplicaState) -> None:
        """Take over what control says of it."""
        self.planned = state
        self.state = effective_state(state, self.reported)

    def heard(self, report: LoadReport, own: int) -> str:
        """Take over its load report; `own` attempts were under way when it was asked. Returns what is wrong."""
        who = (report.replica, report.generation, report.model)
        if who != (self.id, self.generation, self.model):
            self.unheard()
            return f"expected {self.id} generation {self.generation} of {self.model}, found {who}"
        self.reported = report.state
        self.state = effective_state(self.planned, report.state)
        self.places = _figure(report.capacity) or CAPACITY_UNKNOWN
        self.room = room(self.places, self.task)
        self.others = max(0, _figure(report.in_flight) - max(own, len(self.attempts)) - len(self.mirrors))
        self.load = len(self.attempts) + self.others
        return ""

    def replaced(self, report: LoadReport) -> bool:
        """Whether another process now answers in its name, at its address: what was under way there is lost."""
        if (report.replica, report.generation) != (self.id, self.generation):
            return False
        before, self.process = self.process, report.process or self.process
        return before not in ("", self.process)

    def learn_room(self, report: LoadReport, gateways: int, now: float) -> None:
        """See whether its engine is full; of the places that it has then each of the gateways takes its share."""
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
        """It has answered a request by saying that it stops: that counts more than a load report of just before."""
        self.planned = ReplicaState.DRAINING
        self.state = effective_state(self.planned, self.reported)

    def broke_off(self, reason: str, now: float) -> None:
        """An attempt broke off; `reason` is how its call failed, or the code of an error that it answered."""
        if reason == "connect" or reason in RESTARTING:
            self.unheard()
        if reason in ("connect", "lost") or reason in RESTARTING:
            self.lost_at = now
        elif reason in GOING:
            self.drains()

    def unheard(self) -> None:
        """Nothing is known of it: no request goes there until it answers again."""
        self.state = self.reported = UNHEARD
        self.others = 0
        self.load = len(self.attempts)

    def retire(self) -> None:
        """Control does not want it any more; attempts under way may finish."""
        self.retired = True
        self.unheard()
        if not self.attempts:
            self.pool.close()

    def take(self, relay: "Relay", turn: int) -> None:
        """An attempt begins."""
        self.attempts[relay] = None
        if relay.ticket.band == BATCH:
            self.batch[relay] = None
        self.load += 1
        self.last_used = turn
        self.awaited_at = None

    def give_back(self, relay: "Relay") -> bool:
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
    """One model: its routes, its replicas sorted by id, the requests that wait."""

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
        """None: its replicas are all alike."""
        self.account = account
        self.links: list[Link] = []
        self.leaving: list[Link] = []
        """Those that control does not want any more, with attempts under way."""
        self.pricing = Pricing(PrefixIndex())
        self.lengths = Lengths()
        self.running = [0] * len(Band)
        """Attempts under way, by band."""
        self.urgent_at = float("-inf")
        """When requests other than batch work were last known to be about."""
        self.troubled = False
        """Whether the breaker of any replica may be other than closed."""
        self.freed = False
        """Whether an attempt has ended since those who wait were last gone through."""
        self.pumping = False
        """Whether somebody is just sending what waits."""
        self.stay_s = 0.0
        """How long all requests together were here that have ended."""
        self.homes = SessionHomes()
        self._judged_at = 0.0
        self.waiting: RequestQueue[Relay] = RequestQueue(routes.queue_max, routes.queue_timeout_s)

    def link(self, replica: Replica, pool: Pool) -> Link:
        """A new start of a replica."""
        who = (replica.id, replica.generation)
        for relay in (*self.waiting, *(each for link in self.links for each in link.attempts)):
            if who in relay.tried:  # that was another process: a control that begins anew may count from 1 again
                relay.tried = tuple(each for each in relay.tried if each != who)
        meter = Meter(replica.id, self.pricing.index.join())
        return Link(replica, self.routes.name, self.routes.task, pool, meter)

    def seen_by(self, band: Band, now: float) -> Sequence[View]:
        """The replicas as they look to a request of this band where some of the work is batch.

        To an urgent one as if no batch work were there, which steps aside; to batch work without what it has to leave
        to urgent ones, if there were any of late.
        """
        if band < BATCH:
            loads, rooms = [x.load - len(x.batch) for x in self.links], [x.room for x in self.links]
        elif now - self.urgent_at >= LATELY_S:
            return self.links
        else:
            loads = [x.load for x in self.links]
            rooms = [min(x.room, batch_room(x.places, len(x.batch), x.batch_max)) for x in self.links]
        return [Seen(x, load, room) for x, load, room in zip(self.links, loads, rooms, strict=True)]

    def taken(self) -> list[tuple[str, int]]:
        """Replicas, as (id, generation), where an urgent request would queue although batch work steps aside."""
        return [(x.id, x.generation) for x in self.links if x.load - len(x.batch) >= x.places]

    def heard(self, link: Link, report: LoadReport, own: int, asked_at: float, now: float) -> str:
        """Take over a load report; `own` attempts were under way when it was asked. Returns what is wrong."""
        was_live = link.live
        if not was_live and link.lost_at >= asked_at:
            return ""  # it may have been sent before its sender died
        problem = link.heard(report, own)
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
            # an engine counts waiting sequences, not their tokens: each is taken for a usual prompt
            queue_tokens = round(_figure(report.waiting) * lengths.prompt_tokens)
            kv_share = _figure(report.kv_used_tokens) / kv_tokens if kv_tokens else 0.0
            link.meter.report(queue_tokens, kv_share, self.pricing.gateways)
            if kv_tokens:
                self.pricing.index.resize(link.meter.mask, kv_tokens // lengths.tokens(BLOCK_BYTES))
        return problem

    def heard_blocks(self, link: Link, news: BlockNews, now: float) -> str:
        """Take over what has changed in its prefix cache. Returns what is wrong; then it is never believed again."""
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
        """Whether any of those that a request `tried`, as (id, generation), may be dead without being known to be.

        Nothing goes there until it is known: a request that breaks connections is told apart from replicas that died.
        """
        doubtful = [x for x in self.links if x.live and x.lost_at > x.heard_at and (x.id, x.generation) in tried]
        for link in doubtful:
            link.unheard()
        return bool(doubtful)

    def doubt_blocks(self, link: Link) -> None:
        """Believe nothing that it says of its prefix cache any more: only what is sent there counts."""
        link.blocks_seq = None
        if not link.retired:
            self.pricing.index.leave(link.meter.mask)
            link.meter.mask = self.pricing.index.join()

    def source(self, link: Link, ask: Ask | None, hit_tokens: int) -> str:
        """How it is known that so much of a prompt is held there, a `Source`; empty if nothing is."""
        if not hit_tokens or ask is None or not ask.blocks:
            return ""
        depth = min(len(ask.blocks), max(1, hit_tokens // ask.block_tokens))
        if not self.pricing.index.told(link.meter.mask, ask.blocks[depth - 1]):
            return Source.PREDICTED
        return Source.ESTIMATED if link.blocks_estimated else Source.EXACT

    def look_again(self, now: float) -> None:
        """Take the time into account: speeds and prices, handicaps, who is slow. To be done a few times a second."""
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
            link.meter.handicap = handicap / min(handicaps)  # where all have just come, nobody is behind the others
        if any(self.running[:BATCH]):
            self.urgent_at = now

    def unheard(self, link: Link) -> None:
        """Its last report is too old."""
        link.unheard()
        link.meter.report(None, link.meter.kv_share, self.pricing.gateways)

    def unlink(self, link: Link) -> None:
        """Control does not want it any more; attempts under way may finish."""
        link.retire()
        self.pricing.index.leave(link.meter.mask)
        self.leaving = [each for each in (*self.leaving, link) if each.attempts]

    def update(self, routes: ModelRoutes) -> None:
        """Take over what control says."""
        self.routes = routes
        self.split = routes.split
        self.waiting.size_max = routes.queue_max
        self.waiting.timeout_s = routes.queue_timeout_s

    @property
    def in_flight(self) -> int:
        """Attempts under way, also those at replicas that control does not want any more."""
        return sum(len(link.attempts) for link in (*self.links, *self.leaving))

    @property
    def ready(self) -> bool:
        """Whether any replica takes requests."""
        return any(link.live for link in self.links)

    @property
    def serves(self) -> bool:
        """Whether requests are answered, be it after the start of a replica."""
        return self.routes.on_demand or self.ready


def _figure(told: int) -> int:
    return min(max(0, told), FIGURE_MAX)
