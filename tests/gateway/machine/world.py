"""A whole gateway between clients and replicas in memory, and what must hold of its accounts at any moment."""

import io
import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import msgspec
from tests.gateway.machine.clients import LIMITS, Client
from tests.gateway.machine.loop import Tasks, VirtualLoop
from tests.gateway.machine.replicas import Job, Node
from tests.gateway.machine.watched import RETRIES_MAX, Notes, WatchedScheduler, WatchedServed, nobody_waits_in_vain

from forebay.core.admission import Band
from forebay.core.model import (
    Dispatch,
    GatewaySpec,
    ModelRoutes,
    Policy,
    Replica,
    ReplicaState,
    Rule,
    Sessions,
    Snapshot,
    StandIn,
    Task,
    TenancySpec,
    When,
)
from forebay.core.resilience import State
from forebay.core.tenancy import ENTROPY_BYTES, Directory, Quota, Tenant, mint
from forebay.gateway.fleet import Served
from forebay.gateway.gateway import Gateway
from forebay.gateway.link import Link
from forebay.gateway.pages import Pages
from forebay.gateway.polling import Fleet
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.entries import RequestLog
from forebay.gateway.requests.relay import Relay
from forebay.gateway.scheduling.hedging import Hedge
from forebay.gateway.tenancy import AccessControl
from forebay.net.server import Exchange, HttpServer
from forebay.obs import log
from forebay.obs.metrics import Metrics
from forebay.wire.transcript import ended, last_data

TICK_S = 0.25
TENANTS = (
    Tenant("gold", band=Band.INTERACTIVE, band_max=Band.SYSTEM, limits=Quota(60, 90_000, 8, 900_000)),
    Tenant("batch", ("chat*", "auto"), band=Band.BATCH, limits=Quota(streams_max=2)),
    Tenant("gone"),
)
KEYS = {tenant.name: mint(tenant.name, bytes([n]) * ENTROPY_BYTES, now=0.0) for n, tenant in enumerate(TENANTS, 1)}
DISPATCH = Dispatch({"gpt": "chat"}, (Rule("auto", "spare", when=When(header="x-small")), Rule("auto", "chat")))
BASE = ModelRoutes("chat", Task.CHAT, Policy.CPR, "r1", queue_max=2, queue_timeout_s=6.0)
MODELS = (
    replace(BASE, fallback=(StandIn("spare"),), hedge_after_s=0.5),
    replace(BASE, name="spare", policy=Policy.LEAST_REQUESTS, sessions=Sessions.COOKIE),
    replace(BASE, name="embed", task=Task.EMBED, hedge_after_s=0.5),
)
SLOTS = (("chat", 0), ("chat", 1), ("chat", 2), ("spare", 0), ("embed", 0), ("embed", 1))


class Slot:
    """A place for a replica, and what control wants of it."""

    def __init__(self, model: str, number: int) -> None:
        self.model = model
        self.id = f"{model}-{number}"
        self.number = number
        self.generation = 0
        self.wanted = number < 2
        self.state = ReplicaState.READY
        self.capacity = 1
        self.node: Node | None = None


class World:
    """The gateway under test, with everything around it."""

    def __init__(self, *, keys: bool) -> None:
        self.loop = VirtualLoop()
        self.tasks = Tasks(self.loop)
        self.slots = [Slot(*slot) for slot in SLOTS]
        self.models = dict.fromkeys(routes.name for routes in MODELS)
        self.routes = {routes.name: routes for routes in MODELS}
        self.nodes: list[Node] = []
        self.clients: list[Client] = []
        self.given: dict[str, Exchange] = {}
        self.all_served: list[WatchedServed] = []
        self.notes = Notes()
        self.access = io.BytesIO()
        self.metrics = Metrics()
        self.version = 0
        self.sound = True
        self.numbers = itertools.count()
        self.keys = keys
        self.revoked: set[str] = set()
        self.loop.act(self._start)
        self.publish()

    def _start(self) -> None:
        logger = log.configure(io.StringIO())
        spec = GatewaySpec(
            "gateway-0", 1, "", 0, "", "", "", load_poll_s=1.0, replica_timeout_s=3.0, response_buffer_bytes_max=1000,
            retries_max=RETRIES_MAX,
        )  # fmt: skip
        tasks: object = self.tasks
        self.scheduler = WatchedScheduler(spec, RequestLog(AccessLog(self.access), self.notes), Random(7))
        self.scheduler.gave_way, self.scheduler.answering, self.scheduler.unsettled = {}, {}, {}
        self.scheduler.hedges = Counter()
        self.gateway = Gateway(self.scheduler, self.metrics)
        self.pages = Pages(self.gateway, spec, self.metrics, tasks)  # type: ignore[arg-type]
        self.fleet = Fleet(self.gateway, spec, tasks, logger)  # type: ignore[arg-type]
        self.server = HttpServer(self._handle, LIMITS, refused=self.gateway.refused)
        self.server._sweep()
        if self.keys:
            tenancy = TenancySpec(TENANTS, "", "", "")
            now = self.loop.time
            door = AccessControl("gateway-0", tenancy, logger, now=now, wall=now)
            door._directory = Directory(TENANTS, [record for _, record in KEYS.values()])
            self.gateway.access = door

    def _handle(self, exchange: Exchange) -> None:
        given = exchange.header(b"x-request-id")
        assert given is not None
        assert given.decode() not in self.given
        self.given[given.decode()] = exchange
        self.pages.handle(exchange)

    # --- what happens to it

    def publish(self) -> None:
        """Make what control wants real, and tell the gateway."""
        self.loop.act(self._publish)

    def _publish(self) -> None:
        rows: dict[str, list[Replica]] = {name: [] for name in self.models}
        for slot in self.slots:
            if slot.model in rows and slot.wanted:
                if slot.node is None:
                    self._begin(slot)
                assert slot.node is not None
                rows[slot.model].append(replace(slot.node.replica, state=slot.state))
        self.version += 1
        models = tuple(replace(self.routes[name], replicas=tuple(rows[name])) for name in self.models)
        for routes in models:
            if routes.name not in self.gateway.served:
                served = WatchedServed(routes, self.gateway.account(routes.name))
                self.gateway.served[routes.name] = served
                self.all_served.append(served)
        self.fleet._apply(Snapshot(self.version, models, DISPATCH))

    def _begin(self, slot: Slot) -> None:
        slot.generation += 1
        port = 8000 + 10 * self.slots.index(slot) + 100 * slot.generation
        revision = "r2" if slot.number else "r1"
        replica = Replica(slot.id, slot.generation, revision, "a", port, slot.state)
        slot.node = self.loop.hosts[port] = node = Node(
            self.loop, replica, slot.model, slot.capacity, self.numbers.__next__
        )
        self.nodes.append(node)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, with the gateway's own ticks in between."""
        until = self.loop.at + seconds
        while self.loop.at < until:
            self.loop.advance(min(TICK_S, until - self.loop.at))
            self.loop.act(self.scheduler.expire)
            for served in self.gateway.served.values():
                nobody_waits_in_vain(self.scheduler, served, self.loop.at)

    def ask(self, client: Client, path: bytes, body: dict[str, object], headers: dict[str, str]) -> None:
        content = msgspec.json.encode(body)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        client.ask(
            b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (path, lines, len(content), content)
        )

    @property
    def jobs(self) -> list[Job]:
        """Requests at replicas, those of a replica in the order in which they came."""
        return [job for node in self.nodes for job in node.jobs.values() if not job.pipe.closing]

    # --- what must hold

    def attempting(self) -> list[Relay]:
        return [relay for served in self.all_served for link in served.all_links for relay in link.attempts]

    def hedges(self) -> list[Hedge]:
        return [relay for relay in self.attempting() if isinstance(relay, Hedge)]

    def waiting(self) -> list[Relay]:
        return [relay for served in self.all_served for relay in served.waiting._entries]

    def check(self) -> None:
        """All that must hold between any two steps."""
        self.sound = False
        self._everybody_is_in_one_place()
        for served in self.all_served:
            bands = Counter(relay.ticket.band for link in served.all_links for relay in link.attempts)
            assert served.running == [bands[band] for band in Band]
            for link in served.all_links:
                attempts = list(link.attempts)
                assert link.load == len(attempts) + link.others
                assert link.others >= 0
                assert link.room >= 0
                assert all(relay in link.attempts and relay.ticket.band is Band.BATCH for relay in link.batch)
                charges = [relay.charge for relay in attempts if relay.charge is not None and relay.charge.queued]
                assert all(charge.meter is link.meter for charge in charges)
                assert link.meter._unprefilled == sum(charge.tokens for charge in charges)
                breaker = link.breaker
                on_trial = sum(relay.mark == breaker._epoch for relay in attempts)
                assert breaker.probes == (on_trial if breaker.state is State.HALF_OPEN else 0)
                if not link.retired:
                    self._prefixes_are_known(served, link)
        self._second_attempts_have_a_first()
        self._streams_are_counted()
        self._what_has_begun_waits_no_more()
        self.sound = True

    def _everybody_is_in_one_place(self) -> None:
        attempting, waiting = self.attempting(), self.waiting()
        served = list(self.gateway.served.values())
        for relay in attempting:
            assert relay.link is not None
            assert relay in relay.link.attempts
            assert relay._call is not None
            assert relay._call.sink is relay
        for relay in waiting:
            assert relay._call is None
            assert relay.served in served, "it waits for a model that is gone"
            assert relay in relay.served.waiting._entries
        firsts = [relay for relay in attempting if not isinstance(relay, Hedge)]
        ids = Counter(relay.request_id.decode() for relay in (*firsts, *waiting))
        assert not [id for id, count in ids.items() if count > 1], "in two places at once"
        over = Counter(facts.decision.request_id for facts in self.notes.all)
        assert not [id for id, count in over.items() if count > 1], "it ended twice"
        assert ids.keys().isdisjoint(over.keys()), "it has ended and goes on"
        assert ids.keys() | over.keys() == self.given.keys(), "a request is lost"
        silent = {relay.request_id.decode() for relay in attempting if has_all(relay)}
        assert not any(relay._over for relay in (*attempting, *waiting))
        assert all(self.given[id].finished for id in over), "it has ended, its client waits"
        assert not [id for id in ids if self.given[id].finished and id not in silent]

    def _second_attempts_have_a_first(self) -> None:
        """There are two attempts of a request at most, at two replicas, and nobody works on anything else."""
        for hedge in self.hedges():
            first = hedge.first
            assert first.hedge is hedge
            assert first.link is not None
            assert first in first.link.attempts
            assert first.link is not hedge.link
            assert first.unanswered or first.refused
        assert all(relay.hedge is None or relay.hedge.first is relay for relay in self.attempting())
        assert all(relay.hedge is None for relay in self.waiting())
        worked_on = Counter(job.id for job in self.jobs)
        assert worked_on <= Counter(relay.request_id.decode() for relay in self.attempting())

    def _prefixes_are_known(self, served: Served, link: Link) -> None:
        """What a replica has told of its prefix cache is known, and who lies is not believed."""
        node = self.loop.hosts[link.port]
        assert isinstance(node, Node)
        told = served.pricing.index._shares[link.meter.mask].told
        if link.blocks_seq is None:
            assert node.lied
        elif link.blocks_seq > node.forgot:
            assert list(told) == list(node.held)[: link.blocks_seq - 1 - node.forgot]
        if not link.blocks_seq:
            assert not told

    def _streams_are_counted(self) -> None:
        door = self.gateway.access
        if door is None:
            return
        open_streams: Counter[str] = Counter()
        for relay in (*self.attempting(), *self.waiting()):
            if isinstance(relay, Hedge):
                assert relay.admitted is None, "its first attempt pays"
                continue
            assert relay.admitted is not None
            assert not relay.admitted.reservation.settled
            open_streams[relay.admitted.tenant.name] += relay.admitted.reservation.stream
        for name, book in door._limiter._usage.items():
            assert book.streams == open_streams[name]
            assert min(book.requests.slots) >= 0
            assert min(book.tokens.slots) >= 0
            assert book.day_tokens >= 0

    def _what_has_begun_waits_no_more(self) -> None:
        """The first event of an attempt says that the prompt was read, and that a replica on trial works."""
        spoken = {job.id for job in self.jobs if job.spoke}
        for relay in self.attempting():
            if relay.request_id.decode() in spoken and relay.transcript is not None:
                assert relay.link is not None
                assert relay.charge is None or not relay.charge.queued, "its prompt is counted as unread"
                breaker = relay.link.breaker
                assert relay.mark != breaker._epoch or breaker.state is not State.HALF_OPEN, "it is still on trial"

    def check_gauges(self) -> None:
        """What is shown of now is what is so now."""
        self.loop.act(self.pages.render)
        for name, served in self.gateway.served.items():
            assert self.metrics.gauge("queue_depth", name).value == len(served.waiting)
            assert isinstance(served, WatchedServed)
            attempts = sum(len(link.attempts) for link in served.all_links)
            assert self.metrics.gauge("in_flight", name).value == attempts
        for gauge in ("queue_depth", "in_flight"):
            shown = {labels[0] for labels in self.metrics.labels(gauge)}
            assert shown <= self.gateway.served.keys(), f"{gauge} of a model that is gone"

    # --- the end

    def wind_up(self) -> None:
        """Every other client leaves, the rest get their answers; then nothing is left."""
        for job in self.jobs[::2]:
            self.loop.act(lambda: job.do(Job.last_words))  # noqa: B023 - done at once
        for client in self.clients[::2]:
            self.loop.act(client.leave)
        for node in self.nodes:
            node.mode, node.reflex = "honest", None
        for client in self.clients:
            self.loop.act(client.catches_up)
        for _ in range(60):
            for job in self.jobs:
                if not job.gone:
                    self.loop.act(job.complete)
            self.check()
            if not self.jobs:
                self.pass_s(1.0)
            if not self.attempting() and not self.waiting():
                break
        for client in self.clients:
            if client.open:
                self.loop.act(client.leave)
        self.pass_s(1.0)
        self.check()
        assert not self.attempting(), "attempts are left over"
        assert not self.waiting(), "waiting requests are left over"
        self.check_gauges()

    def close(self) -> None:
        """Take it down, whatever state it is in."""
        self.loop.mishaps.clear()
        for end in (self.fleet.close, self.server.close, self.tasks.cancel):
            self.loop.act(end)
        assert not len(self.tasks), "a task is left over"
        self.loop.close()


def has_all(relay: Relay) -> bool:
    """Whether its client has everything, so that it may have left while the token counts are still to come."""
    return relay.transcript is not None and ended(last_data(relay.transcript.last))
