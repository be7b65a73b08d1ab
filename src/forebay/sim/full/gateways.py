"""The product's gateway process, instrumented: invariants are checked at every step."""

import asyncio
import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

import structlog

from forebay.core.admission import Band
from forebay.core.errors import Refusal
from forebay.core.model import GatewaySpec, Policy, RecordsSpec, Replica, ReplicaState
from forebay.core.resilience import State, admissible
from forebay.core.routing import LIVE, Route
from forebay.gateway import serve
from forebay.gateway.dispatch.endpoints import Endpoint
from forebay.gateway.fleet import Served
from forebay.gateway.gateway import Gateway
from forebay.gateway.link import Link
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.entries import RequestLog
from forebay.gateway.records.facts import Facts
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.requests.relay import Relay
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.net.server import Exchange
from forebay.obs.metrics import Metrics
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.machine import RUNNING, ExitError, Process, standing_in
from forebay.sim.full.rollouts.sides import Sides
from forebay.wire.records import NO_CANDIDATES

CONTINUES: Final = b"\r\nx-forebay-continue: "
REQUEST_ID: Final = re.compile(rb"\r\nx-request-id: ([^\r]*)", re.IGNORECASE)
NO_FILES: Final = RecordsSpec("", decisions=False, audit=False)
SIGTERM: Final = 15
LEAVING: Final = frozenset({ReplicaState.DRAINING, ReplicaState.STOPPED, ReplicaState.QUARANTINED})


class Notes(Recorder):
    """Keeps a gateway's records of finished requests; only the ledger behind it is real."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        super().__init__(NO_FILES, "", log)
        self.all: list[Facts] = []

    def start(self) -> bool:
        """There are no files."""
        return True

    def flush(self, now: float) -> None:
        """There are no files."""

    def close(self) -> None:
        """There are no files."""

    def finished(self, facts: Facts) -> None:
        """A request has ended."""
        super().finished(facts)
        facts.decision.candidates = NO_CANDIDATES  # not needed here, and all records are kept
        self.all.append(facts)


class WatchedScheduler(Scheduler):
    """A scheduler that shows each of its steps to the gateway that checks it."""

    watched_by: "WatchedGateway"

    def __init__(self, spec: GatewaySpec, rng: Random, notes: Notes) -> None:
        super().__init__(spec, RequestLog(AccessLog(io.BytesIO()), notes), rng)
        self.notes = notes

    def admit(self, relay: Relay) -> None:
        """A request is queued or sent."""
        super().admit(relay)
        self.watched_by.admitted(relay)

    def send(self, relay: Relay, route: Route) -> None:
        """An attempt begins."""
        begun = relay.exchange.started
        self.watched_by.sending(relay, relay.served.links[route.at])
        super().send(relay, route)
        self.watched_by.sent(relay, begun)

    def attempt_failed(self, relay: Relay, reason: str, problem: Refusal) -> None:
        """An attempt has failed."""
        self.watched_by.failing(relay, reason)
        super().attempt_failed(relay, reason, problem)

    def end_request(self, relay: Relay, code: str, status: int, now: float) -> None:
        """A request has ended."""
        self.watched_by.ending(relay, code)
        super().end_request(relay, code, status, now)
        self.watched_by.ended(relay)


class WatchedGateway(Gateway):
    """A gateway with checks at every step. Once killed, its actions no longer count."""

    def __init__(
        self, scheduler: WatchedScheduler, metrics: Metrics, *, process: Process, event_log: EventLog, sides: Sides
    ) -> None:
        super().__init__(scheduler, metrics)
        scheduler.watched_by = self
        self.process = process
        self.event_log = event_log
        self.notes = scheduler.notes
        self.sides = sides
        self.metrics = metrics
        self.began = self.now()
        self.taken: dict[bytes, Relay | None] = {}
        """Request ids received; with the relay once it has ended."""
        self.shares: dict[bytes, float | None] = {}
        """The canary's share when a request arrived; None: there was no rollout."""

    # --- every step

    def handle(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """A request arrives."""
        id = exchange.header(b"x-request-id") or b""
        self.event_log.note("take", self.process.node, id.decode())
        self.taken.setdefault(id, None)
        for served in self.served.values():
            self.shares[id] = served.split.share if served.split is not None else None
        super().handle(exchange, endpoint)

    def admitted(self, relay: Relay) -> None:
        """A request was queued or sent."""
        waiting = relay.served.waiting
        if relay in waiting.waiting():
            newcomers = sum(not (each.attempts or each.preempted) for each in waiting)
            self._expect(newcomers <= waiting.size_max, "every queue stays within its limit", f"{newcomers} wait")

    def sending(self, relay: Relay, link: Link) -> None:
        """An attempt begins."""
        self._may_be_sent(relay, link)
        self.event_log.note("send", self.process.node, relay.request_id.decode(), link.id, link.generation)

    def sent(self, relay: Relay, begun: bool) -> None:
        """An attempt has begun; the response had `begun` before."""
        call = relay._call
        if begun and call is not None:
            self._expect(
                CONTINUES in call.request, "after the first byte a request is only resumed", relay.request_id.decode()
            )

    def failing(self, relay: Relay, reason: str) -> None:
        """An attempt has failed."""
        self.event_log.note("again", self.process.node, relay.request_id.decode(), reason)

    def ending(self, relay: Relay, code: str) -> None:
        """A request has ended, and is about to be accounted for."""
        id = relay.request_id
        self.event_log.note("over", self.process.node, id.decode(), code)
        self._expect(self.taken.get(id) is None, "every request ends once", id.decode())
        self.taken[id] = relay

    def ended(self, relay: Relay) -> None:
        """A request has ended and is accounted for."""
        self._expect(relay.exchange.finished, "an ended request has a response", relay.request_id.decode())

    def _expect(self, holds: object, rule: str, details: str) -> None:
        if self.process.alive:
            self.event_log.expect(holds, rule, f"{self.process.node}: {details}")

    def _may_be_sent(self, relay: Relay, link: Link) -> None:
        name, served = f"{relay.request_id.decode()} to {link.id}.{link.generation}", relay.served
        wanted = self._wanted(served, link)
        self._expect(wanted is not None, "no request is sent to an old generation", name)
        if wanted is not None:
            self._expect(wanted.state not in LEAVING, "no request is sent to a replica that control drains", name)
        self._expect(link.reported in LIVE, "no request is sent to a draining replica", f"{name}, {link.reported}")
        self._expect(
            link.load < link.room, "no replica gets more requests than it has room for", f"{name}: {link.load}"
        )
        self._expect((link.id, link.generation) not in relay.tried, "no retry on the same replica", name)
        now = self.now()
        live = [each for each in served.links if each.live]
        allowed = [live[at] for at in admissible([each.breaker for each in live], now)]
        others = [x for x in allowed if x.load < x.room and (x.id, x.generation) not in relay.tried]
        if served.split is not None:
            if relay.band < Band.BATCH and not served.running[Band.BATCH]:
                share = self.shares.get(relay.request_id)
                self.sides.check(relay, link, served.split, sound=others, share=share, expect=self._expect)
            others = [each for each in others if each.revision == link.revision]
        self._expect(link in allowed or not others, "circuit breakers are respected", name)
        counts = served.routes.policy is Policy.LEAST_REQUESTS and not served.running[Band.BATCH]
        if counts and link.load and relay.band < Band.BATCH:
            better = [x for x in others if x.state is link.state and x.meter.handicap <= link.meter.handicap]
            free = [x.id for x in better if not x.load]
            self._expect(
                not free, "no request queues at a replica while another is free", f"{name}: {link.load}, {free}"
            )

    def _wanted(self, served: Served, link: Link) -> Replica | None:
        assert self.snapshot is not None
        models = [each for each in self.snapshot.models if each.name == served.routes.name]
        replicas = [each for model in models for each in model.replicas if each.id == link.id]
        return next((each for each in replicas if each.generation == link.generation), None)

    # --- between the steps

    def check(self) -> None:
        """Check the invariants that hold between steps."""
        for served in self.served.values():
            bands = Counter(relay.ticket.band for link in links_of(served) for relay in link.attempts)
            self._expect(
                served.running == [bands[band] for band in Band],
                "running requests are counted by band",
                str(served.running),
            )
            for link in served.links:
                self._check_link(link)

    def _check_link(self, link: Link) -> None:
        attempts = list(link.attempts)
        name = f"{link.id}.{link.generation}"
        self._expect(link.load == len(attempts) + link.others, "load is the sum of attempts and other load", name)
        waits = sum(x.charge.tokens for x in attempts if x.charge is not None and x.charge.queued)
        self._expect(link.meter._unprefilled == waits, "prompts before prefill are counted once", name)
        breaker = link.breaker
        trials = sum(relay.mark == breaker._epoch for relay in attempts)
        expected = trials if breaker.state is State.HALF_OPEN else 0
        self._expect(
            breaker.probes == expected, "breaker probes are counted", f"{name}: {breaker.probes}, {expected} run"
        )
        for relay in attempts:
            there = relay.link is link and self.taken.get(relay.request_id) is None
            self._expect(there, "every attempt belongs to an open request", f"{relay.request_id.decode()} at {name}")

    @property
    def attempts(self) -> int:
        """Attempts in flight."""
        return sum(len(link.attempts) for served in self.served.values() for link in links_of(served))

    @property
    def waiting(self) -> int:
        """Queued requests."""
        return sum(len(served.waiting) for served in self.served.values())

    @property
    def well(self) -> bool:
        """Whether all breakers are closed."""
        return all(x.breaker.state is State.CLOSED for served in self.served.values() for x in served.links)

    def check_quiet(self) -> None:
        """Check the invariants of an idle gateway: counters are back at zero, and records agree."""
        self.check()
        self._expect(self.attempts == 0, "no request is in flight at the end", str(self.attempts))
        self._expect(self.waiting == 0, "no request is queued at the end", str(self.waiting))
        for served in self.served.values():
            for link in served.links:
                self._expect(
                    link.meter._since == 0 and not link.breaker.probes,
                    "meters and breakers are back at zero",
                    link.id,
                )
        open_ids = [id.decode() for id, relay in self.taken.items() if relay is None]
        known = {facts.decision.request_id for facts in self.notes.all}
        self._expect(not set(open_ids) - known, "every request ends", " ".join(sorted(set(open_ids) - known)))
        codes = Counter((x.decision.model or "unknown", x.decision.code) for x in self.notes.all)
        counted = Counter(
            {
                (model, code): int(self.metrics.counter("requests_total", model, code).value)
                for model, code in self.metrics.labels("requests_total")
            }
        )
        self._expect(codes == counted, "metrics agree with the records", f"{codes} {counted}")
        rows = [row for day in self.notes._ledger._days.values() for row in day.values()]
        ledger = sum(row.requests for row in rows), sum(row.completion_tokens for row in rows)
        records = len(self.notes.all), sum(x.decision.completion_tokens for x in self.notes.all)
        self._expect(ledger == records, "the ledger agrees with the records", f"{ledger} {records}")
        for field in ("prompt_tokens", "completion_tokens"):
            told = sum(getattr(facts.decision, field) for facts in self.notes.all)
            shown = self.metrics.labels(f"{field}_total")
            total = sum(self.metrics.counter(f"{field}_total", *labels).value for labels in shown)
            self._expect(told == total, f"{field} are counted once", f"{told}, {total}")


def wanted_by(gateway: WatchedGateway) -> set[str]:
    """Ids of the requests it is waiting for, including mirrored copies."""
    links = [link for served in gateway.served.values() for link in links_of(served)]
    copies = [REQUEST_ID.search(mirror._question) for link in links for mirror in link.mirrors]
    return {
        *(relay.request_id.decode() for link in links for relay in link.attempts),
        *(found[1].decode() for found in copies if found is not None),
    }


def links_of(served: Served) -> list[Link]:
    """All links, including those that control has removed."""
    return [*served.links, *served.leaving]


async def gate(process: Process, log: structlog.stdlib.BoundLogger, seed: int) -> None:
    """Run a gateway process on this node until it is asked to stop. Raises `ExitError`."""
    spec = process.spec
    assert isinstance(spec, GatewaySpec)
    signals: asyncio.Queue[int] = asyncio.Queue(maxsize=16)
    rng = Random(f"{seed} {process.node}")  # noqa: S311 - chance that can be repeated
    process.signal = lambda: signals.put_nowait(SIGTERM)
    try:
        await serve.run(spec, log, AccessLog(io.BytesIO()), signals, rng)
    except serve.NoPort as error:
        raise ExitError(str(error)) from error


@contextmanager
def watched(event_log: EventLog, log: structlog.stdlib.BoundLogger) -> Iterator[list[WatchedGateway]]:
    """Instrument gateway processes within the `with`; all that were ever started are in the list."""
    made: list[WatchedGateway] = []
    sides = Sides()

    def scheduling(spec: GatewaySpec, _: RequestLog, rng: Random) -> WatchedScheduler:
        return WatchedScheduler(spec, rng, Notes(log))

    def make(scheduler: WatchedScheduler, metrics: Metrics) -> WatchedGateway:
        process = RUNNING.get()
        assert process is not None
        gateway = WatchedGateway(scheduler, metrics, process=process, event_log=event_log, sides=sides)
        made.append(gateway)
        return gateway

    with standing_in((serve, "Scheduler", scheduling), (serve, "Gateway", make)):
        yield made
