"""One replica as a gateway sees it: its connections, its load reports, its attempts in flight."""

from math import inf
from typing import TYPE_CHECKING, Final

from forebay.core.admission import Band, PaceModel
from forebay.core.errors import Code
from forebay.core.model import LoadReport, Replica, ReplicaState, Task
from forebay.core.resilience import Breaker
from forebay.core.routing import (
    CAPACITY_UNKNOWN,
    HOLD_S,
    LIVE,
    Meter,
    ReplicaView,
    effective_state,
    learned_room,
    room,
    share_of_room,
)
from forebay.net.client import Pool
from forebay.wire import http1

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.rollout.mirroring import Mirror

FIGURE_MAX: Final = 2**40
"""No real figure of a load report exceeds this or is negative. Others are clamped: the rest may still be right."""
GOING: Final = (Code.DRAINING, Code.FENCED)
"""Error codes of a replica that is going away."""
RESTARTING: Final = (Code.ENGINE_FAILED, Code.ENGINE_STALLED)
"""Error codes of a replica whose engine process is being replaced."""
UNREACHABLE: Final = ReplicaState.STARTING
"""State of a replica that has not answered a load poll lately, or answered under another identity."""
BATCH: Final = Band.BATCH  # looked up once: access to enum members is slow


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
        self.places = figure(report.capacity) or CAPACITY_UNKNOWN
        self.room = room(self.places, self.task)
        self.others = max(0, figure(report.in_flight) - max(own, len(self.attempts)) - len(self.mirrors))
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
        kv_tokens = figure(report.kv_total_tokens)
        learned = learned_room(
            self.filled, self.room, self.places, running=figure(report.running), waiting=figure(report.waiting),
            kv_share=figure(report.kv_used_tokens) / kv_tokens if kv_tokens else 0.0,
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


def figure(reported: int) -> int:
    """A figure of a load report, clamped to 0 to `FIGURE_MAX`."""
    return min(max(0, reported), FIGURE_MAX)
