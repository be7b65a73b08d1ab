"""Deadlines by header and by a model's promise, in the gateway's line and in an engine's; and what waits are told."""

import asyncio
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from tests.gateway.rig import CHAT, ROUTES, Front, Worker, chat, cluster, error_code, post, whole
from tests.net.rig import Answer, lone, peer, run, until

from forebay.core.model import ModelRoutes, RecordsSpec, ReplicaState
from forebay.core.tenancy import ANONYMOUS
from forebay.gateway.asking import make_ticket
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.net.server import Exchange
from forebay.wire import records

PROMISED = replace(ROUTES, ttft_budget_s=0.05)
URGENT = b"x-forebay-priority: interactive"
BY_BATCH = {b"x-forebay-priority": b"batch"}
FULL = 3
"""Requests that a replica with one place gets."""
WAITED_S = 0.08 - 1e-6
"""A deadline after 80 ms: the difference of two times of the clock may be a rounding error less."""


def one_place(held: list[Exchange], model: str = "chat") -> Worker:
    """A replica with one place that answers nothing by itself."""
    worker = Worker(held.append, f"{model}-0", model)
    worker.report = replace(worker.report, capacity=1)
    return worker


async def waiting(front: Front, depth: int) -> None:
    """Until so many requests wait in the gateway."""
    async with asyncio.timeout(10):
        while await front.metric('forebay_queue_depth{model="chat"}') != depth:
            await asyncio.sleep(0.005)


def decisions(folder: Path) -> dict[str, records.Decision]:
    """What was written down, by the id of the request."""
    (file,) = folder.rglob("decisions-*.log")
    return {d.request_id: d for p in records.payloads(file.read_bytes()).whole for d in records.decisions(p)}


@pytest.mark.parametrize(
    ("routes", "fields", "deadline", "due", "last"),
    [
        (ROUTES, {}, 120.0, inf, inf),
        (PROMISED, {}, 120.0, 100.05, inf),
        (replace(PROMISED, drops_late=True), {}, 100.05, 100.05, 100.05),
        (replace(PROMISED, drops_late=True), BY_BATCH, 200.0, inf, inf),
        (replace(PROMISED, drops_late=True), {b"x-forebay-deadline-ms": b"200"}, 100.2, inf, 100.2),
        (ROUTES, {b"x-forebay-deadline-ms": b"45000"}, 120.0, inf, 145.0),
        (ROUTES, BY_BATCH | {b"x-forebay-deadline-ms": b"45000"}, 145.0, inf, 145.0),
    ],
)
def test_deadline_is_the_earlier_of_header_and_model_objective(
    routes: ModelRoutes, fields: dict[bytes, bytes], deadline: float, due: float, last: float
) -> None:
    exchange = lone(b"POST", CHAT, fields)
    ticket = make_ticket(exchange, ANONYMOUS, work_tokens=1.0, began=100.0, routes=routes)
    assert (ticket.deadline, ticket.due, ticket.last) == tuple(map(pytest.approx, (deadline, due, last)))
    cold = make_ticket(exchange, ANONYMOUS, work_tokens=1.0, began=100.0, routes=routes, ready=False)
    assert cold.deadline in {ticket.deadline, 120.0}  # nobody is late for a replica that starts


def test_with_drop_late_a_request_that_misses_its_slo_is_dropped(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        base = replace(PROMISED, drops_late=True)
        async with cluster(tmp_path, one_place(held), base=base) as front, asyncio.TaskGroup() as group:
            running = [group.create_task(front.ask(post(chat()))) for _ in range(FULL)]
            await until(lambda: len(held) == FULL)
            late = await front.ask(post(chat()))
            assert (late.status, error_code(late)) == (504, "deadline_exceeded")
            assert b"within 50 ms (the model's SLO)." in late.body  # the request has named no deadline
            for exchange in held:
                whole(exchange)
            assert {(await task).status for task in running} == {200}

    run(main())


def test_an_slo_alone_drops_no_request_but_goes_before_later_deadlines(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        async with cluster(tmp_path, one_place(held), base=PROMISED) as front, asyncio.TaskGroup() as group:
            asked = [group.create_task(front.ask(post(chat(n=1)))) for _ in range(FULL)]
            await until(lambda: len(held) == FULL)
            asked.append(group.create_task(front.ask(post(chat(n=2), CHAT, b"x-forebay-deadline-ms: 15000"))))
            await waiting(front, 1)
            asked.append(group.create_task(front.ask(post(chat(n=3)))))
            await waiting(front, 2)
            for n in range(FULL + 2):
                await until(lambda n=n: len(held) > n)
                whole(held[n])
            assert {(await task).status for task in asked} == {200}
            assert [exchange.body for exchange in held[FULL:]] == [chat(n=3), chat(n=2)]

    run(main())


def test_stream_still_queued_in_its_engine_at_the_deadline_is_dropped(tmp_path: Path) -> None:
    held: list[Exchange] = []
    gone: list[Exchange] = []

    def hold(exchange: Exchange) -> None:
        held.append(exchange)
        exchange.on_disconnect = lambda: gone.append(exchange)

    async def main() -> None:
        spec = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(hold), records=spec) as front:
            fields = (b"x-forebay-deadline-ms: 50", b"x-request-id: late")
            late = await front.ask(post(chat(stream=True), CHAT, *fields))
            assert (late.status, error_code(late)) == (504, "deadline_exceeded")
            assert (
                b"The answer had not started within 50 ms (x-forebay-deadline-ms)." in late.body
            )  # a replica was free
            await until(lambda: gone == held)
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())
    record = decisions(tmp_path)["late"]
    assert (record.code, record.band, record.deadline_s) == ("deadline_exceeded", "default", pytest.approx(0.05))


def test_stream_that_began_in_time_may_end_after_its_deadline(tmp_path: Path) -> None:
    def slow(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        exchange.write(b'data: {"n":0}\n\n')
        asyncio.get_running_loop().call_later(0.15, done, exchange)

    def done(exchange: Exchange) -> None:
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    async def main() -> None:
        async with cluster(tmp_path, Worker(slow)) as front:
            answer = await front.ask(post(chat(stream=True), CHAT, b"x-forebay-deadline-ms: 50"))
            assert (answer.status, answer.body) == (200, b'data: {"n":0}\n\ndata: [DONE]\n\n')

    run(main())


def test_a_late_request_is_rejected_once_although_another_follows_on_its_connection(tmp_path: Path) -> None:
    lost: list[Exchange] = []

    def lose(exchange: Exchange) -> None:
        lost.append(exchange)
        worker.report = replace(worker.report, state=ReplicaState.STARTING)  # it is waited for
        exchange.abort()

    worker = Worker(lose)

    async def main() -> None:
        spec = RecordsSpec(str(tmp_path / "records"))
        base = replace(ROUTES, queue_max=0)
        async with cluster(tmp_path, worker, base=base, records=spec) as front, peer(front.port) as client:
            fields = (b"x-forebay-deadline-ms: 1000", b"x-request-id: late")  # its attempt has to fail before that
            client.send(post(chat(stream=True), CHAT, *fields) + post(chat(), CHAT, b"x-request-id: next"))
            for status, code in ((504, "deadline_exceeded"), (429, "queue_full")):
                answer = await client.answer()
                assert (answer.status, error_code(answer)) == (status, code)
            assert len(lost) == 1

    run(main())
    assert decisions(tmp_path)["late"].code == "deadline_exceeded"


async def _waits(front: Front) -> tuple[float, float]:
    name = 'forebay_queue_wait_seconds_{}{{model="chat"}}'
    return await front.metric(name.format("count")), await front.metric(name.format("sum"))


def test_a_request_that_timed_out_in_the_queue_is_answered_and_recorded(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        spec = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, one_place(held), records=spec) as front, asyncio.TaskGroup() as group:
            running = [group.create_task(front.ask(post(chat()))) for _ in range(FULL)]
            await until(lambda: len(held) == FULL)
            fields = (b"x-forebay-deadline-ms: 80", b"x-request-id: late")
            late: Answer = await front.ask(post(chat(), CHAT, *fields))
            assert int(late.headers[b"x-forebay-queue-ms"]) >= 80
            assert late.headers[b"x-forebay-model"] == b"chat"
            count, total_s = await _waits(front)
            assert count == FULL + 1
            assert total_s >= WAITED_S
            for exchange in held:
                whole(exchange)
            for task in running:
                await task

    run(main())
    assert decisions(tmp_path)["late"].queued_s >= WAITED_S


def test_waiting_times_of_a_preempted_request_add_up(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        spec = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, one_place(held), records=spec) as front, asyncio.TaskGroup() as group:
            asks = [post(chat(n=n), CHAT, b"x-request-id: %d" % n) for n in range(FULL)]
            asked = [group.create_task(front.ask(each)) for each in asks]
            await until(lambda: len(held) == FULL)
            asked.append(group.create_task(front.ask(post(chat(n=9), CHAT, b"x-forebay-priority: interactive"))))
            await until(lambda: len(held) == FULL + 2)  # one of the two preempted goes behind the urgent one at once
            await asyncio.sleep(0.1)
            while not all(task.done() for task in asked):
                for exchange in held:
                    if not exchange.finished:
                        whole(exchange)
                await asyncio.sleep(0.005)

    run(main())
    seen = decisions(tmp_path)
    preempted = [d for d in seen.values() if len(d.attempts) == 2]
    assert [d.attempts[0].outcome for d in preempted] == ["gave_way"] * 2
    assert max(d.queued_s for d in preempted) >= 0.1


@pytest.mark.parametrize("band", ["batch", "default"])
def test_a_preempted_request_waits_no_longer_than_its_deadline(tmp_path: Path, band: str) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        base = replace(ROUTES, queue_timeout_s=0.1)
        async with cluster(tmp_path, one_place(held), base=base) as front, asyncio.TaskGroup() as group:
            urgent = [group.create_task(front.ask(post(chat(), CHAT, URGENT))) for _ in range(FULL - 1)]
            await until(lambda: len(held) == FULL - 1)
            fields = (b"x-forebay-priority: " + band.encode(), b"x-forebay-deadline-ms: 300")
            victim = group.create_task(front.ask(post(chat(n=7), CHAT, *fields)))
            await until(lambda: len(held) == FULL)
            urgent.append(group.create_task(front.ask(post(chat(), CHAT, URGENT))))
            late = await victim
            assert (late.status, error_code(late)) == (504, "deadline_exceeded")
            assert await front.metric(f'forebay_preemptions_total{{band="{band}",model="chat"}}') == 1
            for exchange in held:
                if not exchange.finished:
                    whole(exchange)
            assert {(await task).status for task in urgent} == {200}

    run(main())


def test_no_request_is_sent_after_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that becomes free between two looks at the clock goes to who still wants it."""
    held: list[Exchange] = []
    monkeypatch.setattr(Scheduler, "expire", lambda _: None)

    async def main() -> None:
        async with cluster(tmp_path, one_place(held)) as front, asyncio.TaskGroup() as group:
            running = [group.create_task(front.ask(post(chat()))) for _ in range(FULL)]
            await until(lambda: len(held) == FULL)
            late = group.create_task(front.ask(post(chat(n=7), CHAT, b"x-forebay-deadline-ms: 1000")))
            await waiting(front, 1)
            running.append(group.create_task(front.ask(post(chat(n=8)))))
            await waiting(front, 2)
            late_at = asyncio.get_running_loop().time() + 1.01
            await until(lambda: asyncio.get_running_loop().time() > late_at)
            whole(held[0])
            answer = await late
            assert (answer.status, error_code(answer)) == (504, "deadline_exceeded")
            await until(lambda: len(held) == FULL + 1)
            assert held[FULL].body == chat(n=8)
            for exchange in held[1:]:
                whole(exchange)
            assert {(await task).status for task in running} == {200}

    run(main())


def test_no_request_is_preempted_for_one_past_its_deadline(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        async with cluster(tmp_path, one_place(held)) as front, asyncio.TaskGroup() as group:
            running = [group.create_task(front.ask(post(chat()))) for _ in range(FULL)]
            await until(lambda: len(held) == FULL)
            late = await front.ask(post(chat(), CHAT, URGENT, b"x-forebay-deadline-ms: 0"))
            assert (late.status, error_code(late)) == (504, "deadline_exceeded")
            assert await front.metric('forebay_preemptions_total{band="default",model="chat"}') == 0
            for exchange in held:
                whole(exchange)
            assert {(await task).status for task in running} == {200}

    run(main())
