"""What must hold of a gateway's books when nothing goes on any more."""

import math
from collections import Counter

import msgspec
from tests.gateway.machine.api_formats import MESSAGES, NOISE, RESPONSES, ends_in, told_at_once, words_in
from tests.gateway.machine.replicas import Job
from tests.gateway.machine.watched import WatchedRoom, WatchedServed
from tests.gateway.machine.world import World

from forebay.core.errors import Code
from forebay.gateway.scheduling.preemption import GAVE_WAY
from forebay.wire.records import Decision


def audit(world: World) -> None:
    """Look through all of them."""
    for served in world.all_served:
        nothing_is_left(served)
    records = {facts.decision.request_id: facts.decision for facts in world.notes.all}
    assert len(records) == len(world.notes.all)
    assert records.keys() == world.given.keys()
    everything_is_counted(world, list(records.values()))
    tokens_are_as_told(world, list(records.values()))
    everything_is_paid(world, list(records.values()))
    hedges_are_as_they_went(world)
    answers_are_as_written_down(world, records)


def nothing_is_left(served: WatchedServed) -> None:
    """Every counter of a model is back at zero."""
    room = served.waiting
    assert len(room) == 0
    assert not room._due
    for line in room._bands:
        assert not any((line._arrivals, line._front_arrivals, line._front, line._tenants, line._ranks))
    for link in served.all_links:
        assert link.load == link.others
        assert link.meter._unprefilled == 0
        assert link.meter._since == 0
        assert link.breaker.probes == 0
        assert not link.retired or link.pool._closed


def everything_is_counted(world: World, records: list[Decision]) -> None:
    """Metrics, access log and ledger say the same of all requests."""
    codes = Counter((record.request_id, record.code) for record in records)
    world.scheduler.log.access.flush()
    lines = [msgspec.json.decode(line) for line in world.access.getvalue().splitlines()]
    assert Counter((line["request_id"], line["code"]) for line in lines) == codes
    counted: Counter[tuple[str, ...]] = Counter()
    for labels in world.metrics.labels("requests_total"):
        counted[labels] += int(world.metrics.counter("requests_total", *labels).value)
    assert Counter((record.model or "unknown", record.code) for record in records) == counted
    rows = [row for day in world.notes._ledger._days.values() for row in day.values()]
    assert sum(row.requests for row in rows) == len(records)
    for field in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        total = sum(getattr(record, field) for record in records)
        assert sum(getattr(row, field) for row in rows) == total
        shown = world.metrics.labels(f"{field}_total")
        assert sum(world.metrics.counter(f"{field}_total", *labels).value for labels in shown) == total


def last_jobs(world: World) -> dict[str, Job]:
    """The last attempt of each request that reached a replica; of two at once the one that went on."""
    found: dict[str, Job] = {}
    for job in sorted((job for node in world.nodes for job in node.seen), key=lambda job: job.number):
        link, replica = world.scheduler.answering[job.id], job.node.replica
        if link is not None and (link.id, link.generation) == (replica.id, replica.generation):
            found[job.id] = job
    return found


def tokens_are_as_told(world: World, records: list[Decision]) -> None:
    """What the last replica told counts; where it told nothing, the gateway says that it has guessed."""
    last = last_jobs(world)
    reached = Counter(job.id for node in world.nodes for job in node.seen)
    for record in records:
        job = last.get(record.request_id)
        told = job.told if job is not None else None
        found = (record.prompt_tokens, record.completion_tokens, record.cached_tokens)
        unheard = job is not None and not job.heard
        last_outcome = record.attempts[-1].outcome if record.attempts else ""
        cut_off = record.status != 200 and last_outcome in {"lost", "protocol"}  # its client got nothing of it
        gave_way = last_outcome == GAVE_WAY or cut_off  # what it had is nobody's
        sent = sum(served.sent[record.request_id] for served in world.all_served)
        if not record.estimated and found != (0, 0, 0):
            assert found == told, f"{told} were told last: {record}"
        elif told is not None:
            assert unheard or gave_way or sent > reached[record.request_id], f"{told} were told last: {record}"


def everything_is_paid(world: World, records: list[Decision]) -> None:
    """Tenants are charged what was used, in the queues and on admission."""
    spent: Counter[str] = Counter()
    for record in records:
        spent[record.tenant] += record.prompt_tokens + record.completion_tokens
    charged: dict[str, float] = dict.fromkeys(spent, 0.0)
    for served in world.all_served:
        assert isinstance(served.waiting, WatchedRoom)
        for tenant, tokens in served.waiting.charged.items():
            charged[tenant] = charged.get(tenant, 0.0) + tokens
    for tenant, tokens in charged.items():
        assert math.isclose(spent[tenant], tokens, abs_tol=1e-6), f"{tenant} used {spent[tenant]}, paid {tokens}"
    door = world.gateway.access
    if door is not None:
        for name, book in door._limiter._usage.items():
            assert book.streams == 0
            assert book.day_tokens == spent[name]
            assert book.tokens.total <= spent[name]


def hedges_are_as_they_went(world: World) -> None:
    """Every second attempt has won or lost."""
    counted: Counter[tuple[str, ...]] = Counter()
    for labels in world.metrics.labels("hedges_total"):
        counted[labels] += int(world.metrics.counter("hedges_total", *labels).value)
    assert counted == world.scheduler.hedges
    assert counted.total() == world.scheduler.hedges_begun


def answers_are_as_written_down(world: World, records: dict[str, Decision]) -> None:
    """Clients that stayed got what the records say, once, in order, and no word twice."""
    last = last_jobs(world)
    for client in world.clients:
        assert len(client.answers) <= client.asked
        assert all(answer.complete for answer in client.answers[:-1]), "an answer follows an incomplete one"
        for answer in client.answers:
            id = answer.headers["x-request-id"]
            record, given = records[id], world.given[id]
            if record.code == Code.STREAM_INTERRUPTED:
                assert not answer.complete
            if record.code == "ok" and not client.left:  # who is far behind is cut off, also after the last event
                assert answer.complete or (client.cut_off and ends_in(answer.body))
            if "set-cookie" in answer.headers:
                assert not given.header(b"x-forebay-session"), "it has a session"
                assert not given.header(b"cookie")
            if "event-stream" in answer.headers["content-type"]:
                words = words_in(answer.body)
                ends = ends_in(answer.body)
                assert ends <= 1
                assert not ends or record.code == "ok", "who has everything may leave"
                if answer.complete:
                    job = last[id]
                    assert words == job.words, "words are missing"
                    if ends and given.target in (MESSAGES, RESPONSES):
                        whole = told_at_once(given.target, id, job.model, words)
                        assert answer.body.replace(NOISE, b"") == whole, "a seam shows"
