"""Who goes first, who gives way, who has waited long enough; and replicas that are not trusted for a while."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.rig import RETRYABLE, ROUTES, Front, Worker, chat, cluster, error_code, failing, post, whole
from tests.net.rig import Answer, run, until

from forebay.core.model import RecordsSpec
from forebay.gateway.scheduling.choosing import TOKENIZING_MAX
from forebay.net.server import Exchange
from forebay.wire import records

CHAT = b"/v1/chat/completions"
ONE = replace(ROUTES, queue_max=2)


def prioritised(band: str, **more: Any) -> bytes:
    """A request of a band; its `user` says which."""
    return post(chat(user=band, **more), CHAT, b"x-forebay-priority: " + band.encode())


class Counter:
    """A worker's handler that holds everything until it is told to answer, and knows the order."""

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.gone: list[bytes] = []

    def __call__(self, exchange: Exchange) -> None:
        self.held.append(exchange)
        exchange.on_disconnect = lambda: self.gone.append(exchange.body)

    def answer(self) -> bytes:
        """Answer the oldest that waits; returns its body."""
        exchange = next(each for each in self.held if not each.finished)
        whole(exchange)
        return exchange.body


async def waiting(front: Front, depth: int) -> None:
    """Until so many requests wait in the gateway."""
    async with asyncio.timeout(10):
        while await front.metric('forebay_queue_depth{model="chat"}') != depth:
            await asyncio.sleep(0.005)


def busy(worker: Worker) -> Worker:
    """A replica that runs one request at a time; the gateway sends it three."""
    worker.report = replace(worker.report, capacity=1)
    return worker


def test_requests_are_served_in_band_order(tmp_path: Path) -> None:
    desk = Counter()

    async def main() -> None:
        base = replace(ROUTES, queue_max=9)
        async with cluster(tmp_path, busy(Worker(desk)), base=base) as front, asyncio.TaskGroup() as group:
            asked = [group.create_task(front.ask(prioritised("interactive"))) for _ in range(3)]
            await until(lambda: len(desk.held) == 3)
            for n, band in enumerate(("batch", "default", "interactive", "batch", "system")):
                asked.append(group.create_task(front.ask(prioritised(band))))
                await waiting(front, n + 1)
            order = []
            while len(order) < 8:  # batch work does not go behind others in an engine
                await until(lambda: any(not each.finished for each in desk.held))
                order.append(desk.answer())
            for task in asked:
                assert (await task).status == 200
            bands = [
                "interactive",
                "system",
                "default",
                "batch",
                "batch",
            ]  # nobody without a key is more than interactive
            assert order[3:] == [chat(user=band) for band in bands]

    run(main())


def test_interactive_request_preempts_requests_without_output_yet(tmp_path: Path) -> None:
    desk = Counter()

    async def main() -> None:
        async with cluster(tmp_path, busy(Worker(desk)), base=ONE) as front, asyncio.TaskGroup() as group:
            low = [group.create_task(front.ask(prioritised("default"))) for _ in range(3)]
            await until(lambda: len(desk.held) == 3)
            urgent = group.create_task(front.ask(prioritised("interactive")))
            await until(lambda: len(desk.held) == 5)
            await until(lambda: len(desk.gone) == 2)
            assert desk.held[3].body == chat(user="interactive"), "it is behind nothing that its engine only queues"
            assert await front.metric('forebay_preemptions_total{band="default",model="chat"}') == 2
            while not (urgent.done() and all(task.done() for task in low)):
                if any(not each.finished for each in desk.held):
                    desk.answer()
                await asyncio.sleep(0.005)
            assert {task.result().status for task in (urgent, *low)} == {200}
            assert len(desk.held) == 6  # those that were preempted were sent again, once

    run(main())


def test_counting_tokens_waits_behind_no_generation(tmp_path: Path) -> None:
    desk, counts = Counter(), Counter()

    def answer(exchange: Exchange) -> None:
        (counts if exchange.path.endswith("count_tokens") else desk)(exchange)

    async def main() -> None:
        async with cluster(tmp_path, busy(Worker(answer)), base=replace(ROUTES, queue_max=9)) as front:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(front.ask(prioritised("default"))) for _ in range(5)]
                await waiting(front, 2)
                count = post(chat(), b"/v1/messages/count_tokens")
                asked += [group.create_task(front.ask(count)) for _ in range(TOKENIZING_MAX)]
                await until(lambda: len(counts.held) == TOKENIZING_MAX)
                asked.append(group.create_task(front.ask(count)))
                await waiting(front, 3)
                assert len(desk.held) == 3, "nothing gave way"
                while not all(task.done() for task in asked):
                    for each in (desk, counts):
                        if any(not exchange.finished for exchange in each.held):
                            each.answer()
                    await asyncio.sleep(0.005)
            assert {task.result().status for task in asked} == {200}
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_full_queue_evicts_the_lowest_band_for_a_higher_one(tmp_path: Path) -> None:
    desk = Counter()

    async def main() -> None:
        async with cluster(tmp_path, busy(Worker(desk)), base=ONE) as front, asyncio.TaskGroup() as group:
            running = [group.create_task(front.ask(prioritised("interactive"))) for _ in range(3)]
            await until(lambda: len(desk.held) == 3)
            low = []
            for n in range(2):
                low.append(group.create_task(front.ask(prioritised("batch", n=1 + n))))
                await waiting(front, n + 1)
            high = group.create_task(front.ask(prioritised("default")))
            answer = await low[1]
            assert (answer.status, error_code(answer)) == (429, "queue_full")
            assert error_code(await front.ask(prioritised("batch"))) == "queue_full"
            while not (high.done() and low[0].done() and all(task.done() for task in running)):
                if any(not each.finished for each in desk.held):
                    desk.answer()
                await asyncio.sleep(0.005)
            assert {task.result().status for task in (high, low[0], *running)} == {200}

    run(main())


def test_request_times_out_at_the_deadline_of_its_header(tmp_path: Path) -> None:
    desk = Counter()

    async def main() -> None:
        async with cluster(tmp_path, busy(Worker(desk)), base=ONE) as front, asyncio.TaskGroup() as group:
            running = [group.create_task(front.ask(prioritised("interactive"))) for _ in range(3)]
            await until(lambda: len(desk.held) == 3)
            late = await front.ask(post(chat(), CHAT, b"x-forebay-deadline-ms: 50"))
            assert (late.status, error_code(late)) == (504, "deadline_exceeded")
            assert b"retry-after" in late.headers
            for _ in running:
                desk.answer()

    run(main())


NO_NUMBER = b"'x-forebay-deadline-ms': expected an integer in milliseconds, at most 9 digits."


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (b"x-forebay-priority: urgent", b"'x-forebay-priority': allowed are"),
        (b"x-forebay-deadline-ms: soon", NO_NUMBER),
        (b"x-forebay-deadline-ms: -1", NO_NUMBER),
    ],
)
def test_an_invalid_priority_or_deadline_is_rejected_with_the_header(
    tmp_path: Path, field: bytes, text: bytes
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(whole)) as front:
            answer: Answer = await front.ask(post(chat(), CHAT, field))
            assert (answer.status, error_code(answer)) == (400, "invalid_request")
            assert text in answer.body

    run(main())


def test_repeatedly_failing_replica_gets_no_requests_for_a_while(tmp_path: Path) -> None:
    def dying(exchange: Exchange) -> None:
        exchange.abort()

    async def main() -> None:
        good, bad = Worker(whole, "chat-0"), Worker(dying, "chat-1")
        async with cluster(tmp_path, good, bad, Worker(whole, "chat-2")) as front:
            await until(lambda: bool(good.polls and bad.polls))
            for _ in range(40):
                assert (await front.ask(post(chat()))).status == 200
            assert 5 <= len(bad.requests) <= 7
            line = 'forebay_replica_breaker{model="chat",replica="chat-1",state="open"}'
            assert await front.metric(line) == 1

    run(main())


@pytest.mark.parametrize("answer", [failing(400, "invalid_request"), failing(503, "overloaded", RETRYABLE)])
def test_client_errors_and_full_replicas_do_not_open_a_breaker(tmp_path: Path, answer: Any) -> None:
    async def main() -> None:
        workers = [Worker(answer, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            for _ in range(12):
                await front.ask(post(chat()))
            for worker in workers:
                line = f'forebay_replica_breaker{{model="chat",replica="{worker.replica}",state="closed"}}'
                assert await front.metric(line) == 1

    run(main())


def test_requests_are_sent_when_every_breaker_is_open(tmp_path: Path) -> None:
    def dying(exchange: Exchange) -> None:
        exchange.abort()

    async def main() -> None:
        workers = [Worker(dying, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            for _ in range(20):
                assert (await front.ask(post(chat()))).status == 502
            for worker in workers:
                worker.answer = whole
            assert (await front.ask(post(chat()))).status == 200

    run(main())


def test_every_request_is_recorded_once_with_its_routing(tmp_path: Path) -> None:
    def dying(exchange: Exchange) -> None:
        exchange.abort()

    async def main() -> None:
        spec = RecordsSpec(str(tmp_path / "records"))
        workers = [Worker(dying, "chat-0"), Worker(whole, "chat-1")]
        async with cluster(tmp_path, *workers, records=spec) as front:
            await until(lambda: all(worker.polls for worker in workers))
            await front.ask(post(chat(), CHAT, b"x-request-id: first"))
            await front.ask(post(b"{", CHAT, b"x-request-id: second"))
            await front.ask(post(chat("none"), CHAT, b"x-request-id: third"))

    run(main())
    (file,) = (tmp_path / "records").rglob("decisions-*.log")
    seen = {d.request_id: d for p in records.payloads(file.read_bytes()).whole for d in records.decisions(p)}
    assert list(seen) == ["first", "second", "third"]
    first = seen["first"]
    assert [(a.replica, a.outcome) for a in first.attempts] == [("chat-0", "lost"), ("chat-1", "ok")]
    assert (first.chosen, first.code, first.prompt_tokens, first.completion_tokens) == ("chat-1", "ok", 7, 3)
    assert {c.replica for c in records.candidates(first.candidates)} == {"chat-0", "chat-1"}
    assert (seen["second"].code, seen["third"].code) == ("invalid_json", "model_not_found")
    (audit,) = (tmp_path / "records").rglob("audit-*.jsonl")
    text = audit.read_text()
    assert "secret prompt" not in text
    assert text.count('"first"') == 1
