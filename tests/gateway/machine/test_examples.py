"""Examples that the machine finds too seldom to be relied on."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from tests.gateway.machine.accounting import audit
from tests.gateway.machine.api_formats import CHAT, EMBED, TOKENIZE
from tests.gateway.machine.clients import Client
from tests.gateway.machine.replicas import Job
from tests.gateway.machine.watched import LIMITS
from tests.gateway.machine.world import SLOTS, World

from forebay.core.admission import LATELY_S, Band
from forebay.core.model import Condition, Policy, ReplicaState, Sessions, StandIn, Task
from forebay.core.routing import Route, Shed, Wait, choose
from forebay.gateway.dispatch import fallback
from forebay.gateway.dispatch.dispatching import condition
from forebay.gateway.fleet import Served
from forebay.gateway.requests.relay import Relay
from forebay.gateway.scheduling.holding import LOOK_MAX

pytestmark = pytest.mark.interpreted


@pytest.fixture
def world() -> Iterator[World]:
    world = World(keys=False)
    try:
        world.pass_s(1.0)
        yield world
        world.check()
        world.wind_up()
        audit(world)
    finally:
        world.close()


def ask(world: World, path: bytes, model: str, stream: bool = True, /, choices: int = 1, **headers: str) -> str:
    """Send a request from a client of its own. Returns its id."""
    client = Client(world.loop, world.server)
    world.clients.append(client)
    id = f"q{len(world.clients)}"
    fields = {"x-request-id": id} | {name.replace("_", "-"): value for name, value in headers.items()}
    text: dict[str, object] = {"messages": [], "stream": stream, "n": choices} if path == CHAT else {"input": "x"}
    if path.endswith(b"/v1/completions"):
        text = {"prompt": [1, 2, 3]}
    world.loop.act(lambda: world.ask(client, path, {"model": model, **text}, fields))
    return id


def at(world: World, slot: str) -> list[Job]:
    """What a replica works on."""
    return [job for job in world.jobs if job.node.replica.id == slot]


def test_request_bound_to_an_open_breaker_overtakes_unbound_ones(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], fallback=(), queue_max=9)
    world.publish()
    for model in ("chat@r1", "chat@r2"):
        for _ in range(3):
            ask(world, CHAT, model)
    anywhere = [ask(world, CHAT, "chat") for _ in range(2)]
    there = ask(world, CHAT, "chat@r2")
    first, second, _ = at(world, "chat-1")
    world.loop.act(lambda: first.do(Job.lose))
    assert at(world, "chat-1")[-1].id == anywhere[0]
    world.loop.act(lambda: second.do(Job.lose))
    assert at(world, "chat-1")[-1].id == there
    assert [relay.request_id.decode() for relay in world.waiting()] == anywhere[1:]


def test_first_event_of_a_half_open_probe_admits_waiting_requests(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], fallback=(), queue_max=9)
    world.publish()
    for _ in range(LIMITS.failures_max):
        ask(world, CHAT, "chat@r2")
        (job,) = at(world, "chat-1")
        world.loop.act(partial(job.do, Job.lose))
    for _ in range(3):
        ask(world, CHAT, "chat@r1")
    world.pass_s(LIMITS.open_s)
    probe, waits = [ask(world, CHAT, "chat") for _ in range(2)]
    (job,) = at(world, "chat-1")
    assert job.id == probe
    world.loop.act(lambda: job.do(Job.begin, Job.say))
    assert [job.id for job in at(world, "chat-1")] == [probe, waits]


def test_waiting_request_uses_an_open_breaker_when_all_breakers_are_open(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], fallback=(), queue_max=9)
    world.slots[2].wanted, world.slots[2].state = True, ReplicaState.DRAINING  # it has r2, too
    for slot in world.slots[:2]:
        slot.capacity = 3
    world.publish()
    for model in ("chat@r1", "chat@r1", "chat@r2", "chat@r2"):
        ask(world, CHAT, model)
    for name, model in (("chat-0", "chat@r1"), ("chat-1", "chat@r2")):
        world.pass_s(LIMITS.open_s / 2)
        for _ in range(LIMITS.failures_max):
            ask(world, CHAT, model)
            job = at(world, name)[-1]
            world.loop.act(partial(job.do, Job.lose))
    for model in ("chat@r1", "chat@r2"):  # both are shut, so both are let through
        ask(world, CHAT, model)
    shut, other = ask(world, CHAT, "chat@r2"), ask(world, CHAT, "chat@r1")
    world.pass_s(LIMITS.open_s * 0.75)  # chat-0 is on trial now
    world.loop.act(at(world, "chat-1")[0].complete)
    assert [relay.request_id.decode() for relay in world.waiting()][-2:] == [shut, other]
    world.loop.act(at(world, "chat-0")[0].complete)
    assert (at(world, "chat-0")[-1].id, at(world, "chat-1")[-1].id) == (other, shut)


def test_no_request_is_dropped_from_a_full_queue_while_a_replica_has_room(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], fallback=(), queue_max=1)
    world.publish()
    for model in ("chat@r1", "chat@r1", "chat@r1", "chat@r2", "chat@r2", "chat"):
        ask(world, CHAT, model)
    waits = ask(world, CHAT, "chat")
    job = at(world, "chat-1")[-1]
    world.loop.act(lambda: job.do(Job.lose))
    ask(world, CHAT, "chat@r1", x_forebay_priority="interactive")
    assert at(world, "chat-1")[-1].id == waits
    assert [relay.request_id.decode() for relay in world.waiting()] == [job.id], "who was admitted before stays"


def test_fallback_model_without_hedging_is_not_hedged(world: World) -> None:
    fallback = (StandIn("embed"),)
    world.routes["spare"] = replace(world.routes["spare"], task=Task.EMBED, fallback=fallback, hedge_after_s=0.5)
    world.routes["embed"] = replace(world.routes["embed"], hedge_after_s=0.0)
    world.publish()
    ask(world, EMBED, "spare")
    world.pass_s(0.25)
    (job,) = world.jobs
    world.loop.act(lambda: job.do(Job.lose))
    world.pass_s(1.0)
    (job,) = world.jobs
    assert job.model == "embed"


def test_the_place_of_a_request_that_a_fallback_model_refuses_goes_to_the_next_one_there(world: World) -> None:
    for slot in world.slots[:2]:
        slot.wanted = False
    world.publish()
    refused, *_ = [ask(world, CHAT, "chat") for _ in range(3)]
    waits = ask(world, CHAT, "spare")
    assert [relay.request_id.decode() for relay in world.waiting()] == [waits]
    job = at(world, "spare-0")[0]
    assert job.id == refused
    world.loop.act(lambda: job.do(Job.does_not_support_it))
    assert at(world, "spare-0")[-1].id == waits
    assert [relay.request_id.decode() for relay in world.waiting()] == [refused]


def test_requests_overtake_a_session_waiting_for_its_replica(world: World) -> None:
    world.routes["chat"] = replace(
        world.routes["chat"], policy=Policy.LEAST_REQUESTS, sessions=Sessions.HEADER, fallback=(), queue_max=1
    )
    world.publish()
    sessions = [ask(world, CHAT, "chat", x_forebay_session="s") for _ in range(4)]
    assert len(world.jobs) == 3
    ask(world, CHAT, "chat")
    assert len(world.jobs) == 4
    assert [relay.request_id.decode() for relay in world.waiting()] == sessions[3:]


def test_a_preempted_or_cancelled_request_ends_both_hedged_attempts(world: World) -> None:
    def late(**headers: str) -> None:
        ask(world, TOKENIZE, "embed", **headers)
        world.pass_s(0.75)
        assert len(world.hedges()) == 1

    late()
    urgent = [ask(world, EMBED, "embed", x_forebay_priority="interactive") for _ in range(3)]
    assert {job.id for job in world.jobs} == {"q1", *urgent}
    assert not world.hedges()
    for job in world.jobs:
        world.loop.act(job.complete)
    late()
    world.loop.act(world.clients[-1].leave)
    assert not world.jobs
    assert world.scheduler.hedges == {("embed", "lost"): 2}


def test_batch_stream_is_preempted_and_resumed(world: World) -> None:
    batch = [ask(world, CHAT, "chat", x_forebay_priority="batch") for _ in range(6)]
    assert len(world.jobs) == 6
    for job in world.jobs:
        world.loop.act(lambda: job.do(Job.begin, Job.say_much))  # noqa: B023 - done at once
    urgent = [ask(world, CHAT, "chat", x_forebay_priority="interactive") for _ in range(2)]
    assert {job.id for job in world.jobs if job.id not in batch} == set(urgent)
    assert len(world.jobs) == 2, "each replica runs one at a time"
    for job in world.jobs:
        world.loop.act(job.complete)
    assert len(world.jobs) == 2
    assert all(job.continues and job.words == 9 for job in world.jobs)
    world.pass_s(LATELY_S + 1.0)
    assert len(world.jobs) == 6, "nobody else has come"


def test_a_request_that_cannot_be_resumed_is_not_preempted(world: World) -> None:
    for _ in range(6):
        ask(world, CHAT, "chat", x_forebay_priority="batch")
    for job in world.jobs:
        world.loop.act(lambda: job.do(Job.begin, Job.say_what_nobody_understands))  # noqa: B023 - done at once
    ask(world, CHAT, "chat", x_forebay_priority="interactive")
    assert len(world.jobs) == 6
    assert len(world.waiting()) == 1


def test_aged_batch_request_is_promoted_and_not_preempted(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], fallback=(), queue_max=9, queue_timeout_s=400.0)
    world.publish()
    for _ in range(6):
        ask(world, CHAT, "chat", x_forebay_priority="interactive")
    old, new = [ask(world, CHAT, "chat", x_forebay_priority="batch") for _ in range(2)]
    world.pass_s(121.0)
    later = ask(world, CHAT, "chat")
    world.loop.act(world.jobs[0].complete)
    (job,) = [job for job in world.jobs if job.id == old]
    world.loop.act(lambda: job.do(Job.begin, Job.say))
    urgent = ask(world, CHAT, "chat", x_forebay_priority="interactive")
    assert not job.gone
    waiting = world.gateway.served["chat"].waiting
    assert [relay.request_id.decode() for relay in waiting] == [urgent, later, new]


@pytest.mark.parametrize(("path", "model"), [(CHAT, "chat"), (EMBED, "embed")])
def test_replica_whose_whole_answers_are_late_is_called_slow(world: World, path: bytes, model: str) -> None:
    routes = world.routes[model]
    world.routes[model] = replace(routes, policy=Policy.ROUND_ROBIN, fallback=(), hedge_after_s=0.0)
    world.publish()
    links = world.gateway.served[model].links
    for _ in range(16):
        for _ in links:
            ask(world, path, model, False)
        for slot, seconds in ((f"{model}-1", 0.1), (f"{model}-0", 0.9)):
            world.pass_s(seconds)
            for job in at(world, slot):
                world.loop.act(job.whole)
    assert [link.breaker.brown_out.active for link in links] == [True, False]


def test_replica_that_loses_to_hedges_is_called_slow(world: World) -> None:
    world.routes["embed"] = replace(world.routes["embed"], policy=Policy.ROUND_ROBIN, hedge_after_s=0.5)
    world.publish()
    links = world.gateway.served["embed"].links
    for _ in range(32):
        ask(world, EMBED, "embed")
        for _ in range(2):
            for job in at(world, "embed-1"):
                world.loop.act(job.whole)
            world.pass_s(0.5)
    assert world.scheduler.hedges["embed", "won"] >= 5
    assert [link.breaker.brown_out.active for link in links] == [True, False]


@pytest.mark.parametrize("answer", ["allow", "deny"])
def test_looking_for_fallbacks_does_not_take_longer_the_longer_the_queue(
    world: World, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    looked: list[str] = []

    def counted(served: Served, band: Band) -> Condition:
        looked.append(served.routes.name)
        return condition(served, band)

    world.routes["chat"] = replace(world.routes["chat"], queue_max=99, queue_timeout_s=60.0)
    world.publish()
    for _ in range(60):
        ask(world, CHAT, "chat", x_forebay_fallback=answer)
    waiting = len(world.waiting())
    monkeypatch.setattr(fallback, "condition", counted)
    world.loop.act(world.scheduler.expire)
    assert looked == [], "nobody has waited for long"
    world.loop.advance(31.0)
    world.loop.act(world.scheduler.expire)
    fell = waiting - len(world.waiting())
    assert (fell > 0) is (answer == "allow")
    assert len(looked) <= fell + 1


def test_request_that_a_fallback_takes_over_as_its_model_is_removed_is_answered_by_it(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], queue_max=9, queue_timeout_s=2.5)
    world.publish()
    begun, waiting = [ask(world, CHAT, "chat") for _ in range(6)], [ask(world, CHAT, "chat") for _ in range(3)]
    world.loop.advance(2.6)  # since the last look at the queue
    assert {relay.request_id.decode() for relay in world.waiting()} == {*waiting}
    del world.models["chat"]
    world.publish()
    assert [job.id for job in at(world, "spare-0")] == waiting[1:], "rejecting the first one ended the others' wait"
    for job in [*at(world, "spare-0"), *(job for job in world.jobs if job.id in begun)]:
        world.loop.act(job.complete)
    assert [client.answers[0].status for client in world.clients] == [*[200] * 6, 404, 200, 200]


def test_looking_for_room_does_not_take_longer_the_more_sessions_wait(world: World) -> None:
    looked: list[str] = []

    def counted(*given: object, **more: object) -> Route | Wait | Shed:
        looked.append("")
        return choose(*given, **more)  # type: ignore[arg-type]  # passed on

    routes = replace(world.routes["chat"], queue_max=999, queue_timeout_s=60.0, sessions=Sessions.HEADER)
    world.routes["chat"] = replace(routes, fallback=())
    world.publish()
    for n in range(6):
        ask(world, CHAT, "chat", x_forebay_session=f"known {n}")
    for n in range(200):
        ask(world, CHAT, "chat", x_forebay_session=f"known {n % 6}" if n < 100 else f"new {n}")
    assert len(world.waiting()) == 200
    world.scheduler.chooser = counted
    world.loop.act(lambda: world.scheduler.pump(world.gateway.served["chat"]))
    assert len(looked) <= len(SLOTS) + LOOK_MAX


def test_breakers_that_have_all_closed_again_leave_the_first_request_to_speak_for_all(world: World) -> None:
    served = world.gateway.served["chat"]
    world.routes["chat"] = replace(world.routes["chat"], fallback=(), queue_max=9)
    world.publish()
    ask(world, CHAT, "chat")
    (job,) = world.jobs
    world.loop.act(lambda: job.do(Job.lose))
    assert served.troubled
    world.pass_s(1.0)
    assert not served.troubled


def test_urgent_request_of_a_session_takes_the_slot_of_a_lower_priority_at_its_replica(world: World) -> None:
    world.routes["chat"] = replace(world.routes["chat"], sessions=Sessions.HEADER, fallback=(), queue_max=9)
    world.publish()
    ask(world, CHAT, "chat", x_forebay_session="s", x_forebay_priority="interactive")
    (home,) = {job.node.replica.id for job in world.jobs}
    world.loop.act(at(world, home)[0].complete)
    for n in range(40):
        ask(world, CHAT, "chat", x_forebay_session=f"other {n}")
    assert {len(at(world, slot)) for slot in ("chat-0", "chat-1")} == {3}
    urgent = ask(world, CHAT, "chat", x_forebay_session="s", x_forebay_priority="interactive")
    assert urgent in {job.id for job in at(world, home)}


def test_replica_that_gets_the_requests_for_one_choice_is_not_called_slow(world: World) -> None:
    for slot in world.slots[:2]:
        slot.capacity, slot.node = 8, None
    world.publish()
    world.pass_s(2.0)
    links, lengths = world.gateway.served["chat"].links, world.gateway.served["chat"].lengths
    for _ in range(12):
        for slot, model, choices in (("chat-0", "chat@r1", 8), ("chat-1", "chat@r2", 1)):
            ask(world, CHAT, model, choices=choices)
            (job,) = at(world, slot)
            world.loop.act(lambda: job.do(Job.begin, Job.say))  # noqa: B023 - done at once
        world.pass_s(3.0)
        for slot, tokens in (("chat-0", 160), ("chat-1", 20)):
            (job,) = at(world, slot)
            job.told = (11, tokens, 4)
            world.loop.act(lambda: job.do(Job.last_words))  # noqa: B023 - done at once
            world.loop.act(partial(job._trail, b"x-forebay-usage: %d,%d,%d\r\n" % job.told))
    assert [link.breaker.brown_out.active for link in links] == [False, False]
    assert lengths.pace_s > 0.1
    assert world.gateway.account("chat").tpot.sum > 2 * 12 * 0.1
    assert links[0].meter.pace_s(1.0) == pytest.approx(links[1].meter.pace_s(1.0), rel=0.1)


def test_request_that_no_other_model_can_serve_is_read_once_for_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(relay: Relay, model: str) -> fallback.Made | None:
        read.append(model)
        return made_for(relay, model)

    made_for = fallback._made_for
    monkeypatch.setattr(fallback, "_made_for", counted)
    world.routes["chat"] = replace(world.routes["chat"], queue_max=99, queue_timeout_s=60.0)
    world.publish()
    for _ in range(20):
        ask(world, CHAT.replace(b"/chat", b""), "chat", False, x_forebay_fallback="allow")
    waiting = len(world.waiting())
    world.loop.advance(31.0)
    for _ in range(3):
        world.loop.act(world.scheduler.expire)
    assert len(world.waiting()) == len(read) == waiting > 0
