"""Hedged requests: the first answer counts, the other attempt ends at once, and nothing is counted twice."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.rig import JSON, ROUTES, USAGE, Front, Worker, chat, cluster, failing, post, silent
from tests.net.rig import Answer, run, until

from forebay.core.model import RecordsSpec, Task
from forebay.core.resilience import DEFAULTS
from forebay.net.server import Exchange, Handler
from forebay.wire import records

EMBED = replace(ROUTES, name="embed", task=Task.EMBED, hedge_after_s=0.02)
ASK = post(b'{"model":"embed","input":"x"}', b"/v1/embeddings")
NEVER_S = 3600.0
TWO = 'model="embed",replica="embed-1"'


def embedded(exchange: Exchange) -> None:
    """Answer well, at once."""
    exchange.respond(200, [JSON, USAGE], b'{"object":"list"}')


def cut(exchange: Exchange) -> None:
    """Cut the connection without a word."""
    exchange.abort()


@asynccontextmanager
async def pair(
    folder: Path, hedge_after_s: float = EMBED.hedge_after_s
) -> AsyncIterator[tuple[Front, Worker, Worker]]:
    """A gateway with two replicas that do not answer by themselves; the first gets the first request."""
    one, two = workers = [Worker(silent, f"embed-{n}", "embed") for n in range(2)]
    async with cluster(folder, *workers, base=replace(EMBED, hedge_after_s=hedge_after_s)) as front:
        await until(lambda: all(worker.polls for worker in workers))
        yield front, one, two


async def settled(front: Front, won: int, lost: int, *, in_flight: int = 0) -> None:
    """Wait until so many attempts, by default none, are under way, and see what was counted."""
    async with asyncio.timeout(10):
        while await front.metric('forebay_in_flight{model="embed"}') != in_flight:
            await asyncio.sleep(0.005)
    assert await front.metric('forebay_hedges_total{model="embed",outcome="won"}') == won
    assert await front.metric('forebay_hedges_total{model="embed",outcome="lost"}') == lost


async def hedged(front: Front, one: Worker, two: Worker, then: Callable[[], None]) -> Answer:
    """RoutingRequest, wait until both replicas have the request, do something, and return the answer."""
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(front.ask(ASK))
        await until(lambda: bool(one.requests and two.requests))
        then()
    return answer.result()


def test_winning_hedge_cancels_the_first_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):
            answer = await hedged(front, one, two, lambda: embedded(two.requests[0]))
            assert (answer.status, answer.body) == (200, b'{"object":"list"}')
            assert answer.headers[b"x-forebay-replica"] == b"embed-1"
            await until(lambda: one.requests[0].finished)
            await settled(front, won=1, lost=0)

    run(main())


def test_record_of_a_winning_hedge_shows_its_own_routing(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(silent, f"embed-{n}", "embed") for n in range(2)]
        spec = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, *workers, base=EMBED, records=spec) as front:
            await until(lambda: all(worker.polls for worker in workers))
            await hedged(front, *workers, lambda: embedded(workers[1].requests[0]))

    run(main())
    (file,) = (tmp_path / "records").rglob("decisions-*.log")
    (record,) = [d for p in records.payloads(file.read_bytes()).whole for d in records.decisions(p)]
    loads = {c.replica: c.load for c in records.candidates(record.candidates)}
    assert (record.chosen, record.why) == ("embed-1", "the only replica that can take it now")
    assert loads == {"embed-0": 1, "embed-1": 0}
    assert record.queued_s < EMBED.hedge_after_s


def test_winning_first_attempt_cancels_the_hedge(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):
            answer = await hedged(front, one, two, lambda: embedded(one.requests[0]))
            assert answer.headers[b"x-forebay-replica"] == b"embed-0"
            await until(lambda: two.requests[0].finished)
            await settled(front, won=0, lost=1)

    run(main())


@pytest.mark.parametrize("fault", [cut, failing(503, "overloaded", (b"x-forebay-retryable", b"1"))])
def test_hedge_replaces_a_failed_first_attempt(tmp_path: Path, fault: Handler) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):

            def fail_then_answer() -> None:
                fault(one.requests[0])
                asyncio.get_running_loop().call_later(0.05, embedded, two.requests[0])

            answer = await hedged(front, one, two, fail_then_answer)
            assert (answer.status, answer.headers[b"x-forebay-replica"]) == (200, b"embed-1")
            assert (len(one.requests), len(two.requests)) == (1, 1)
            await settled(front, won=1, lost=0)

    run(main())


@pytest.mark.parametrize("fault", [cut, failing(500, "internal_error"), failing(503, "overloaded")])
def test_failed_hedge_does_not_affect_the_first_attempt(tmp_path: Path, fault: Handler) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):

            def fail_then_answer() -> None:
                fault(two.requests[0])
                asyncio.get_running_loop().call_later(0.05, embedded, one.requests[0])

            answer = await hedged(front, one, two, fail_then_answer)
            assert (answer.status, answer.headers[b"x-forebay-replica"]) == (200, b"embed-0")
            await settled(front, won=0, lost=1)

    run(main())


@pytest.mark.parametrize("status", [501, 503, 504])
def test_answer_to_a_hedge_that_is_not_the_fault_of_its_replica_does_not_trip_its_breaker(
    status: int, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):
            two.answer = lambda exchange: exchange.respond(status, [JSON], b'{"error":"too late"}')
            for n in range(DEFAULTS.failures_max):
                two.requests.clear()
                async with asyncio.TaskGroup() as group:
                    answer = group.create_task(front.ask(ASK))
                    await until(lambda: bool(two.requests))
                    await settled(front, won=0, lost=n + 1, in_flight=1)
                    embedded(one.requests[-1])
                assert answer.result().status == 200
            assert await front.metric(f'forebay_replica_breaker{{{TWO},state="closed"}}') == 1

    run(main())


def test_no_hedge_goes_to_a_replica_whose_breaker_is_open(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):
            one.answer, two.answer = embedded, failing(500, "internal_error")
            while await front.metric(f'forebay_replica_breaker{{{TWO},state="open"}}') != 1:
                await front.ask(ASK)
            one.answer, asked = silent, (len(one.requests), len(two.requests))
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(front.ask(ASK))
                await until(lambda: len(one.requests) > asked[0])
                polls = two.polls
                await until(lambda: two.polls > polls + 5)
                assert len(two.requests) == asked[1]
                embedded(one.requests[-1])
            assert answer.result().status == 200

    run(main())


def test_replica_that_a_hedge_cannot_connect_to_gets_no_more_requests(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = workers = [Worker(silent, f"embed-{n}", "embed") for n in range(2)]
        async with cluster(tmp_path, *workers, base=EMBED, load_poll_s=NEVER_S) as front:
            await until(lambda: all(worker.polls for worker in workers))
            two.server.close()
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(front.ask(ASK))
                async with asyncio.timeout(10):
                    while await front.metric('forebay_hedges_total{model="embed",outcome="lost"}') != 1:
                        await asyncio.sleep(0.005)
                assert await front.metric(f"forebay_replica_up{{{TWO}}}") == 0
                embedded(one.requests[0])
            assert answer.result().status == 200

    run(main())


def test_failure_of_both_hedged_attempts_is_reported_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):

            def fail_both() -> None:
                cut(two.requests[0])
                cut(one.requests[0])

            answer = await hedged(front, one, two, fail_both)
            assert answer.status == 502
            await settled(front, won=0, lost=1)

    run(main())


def test_client_disconnect_cancels_both_hedged_attempts(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (front, one, two):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(ASK)
            await until(lambda: bool(one.requests and two.requests))
            writer.transport.abort()
            await until(lambda: one.requests[0].finished and two.requests[0].finished)
            await settled(front, won=0, lost=1)
            assert not await reader.read()

    run(main())


def test_generative_or_punctual_requests_are_not_hedged(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(embedded, f"embed-{n}", "embed") for n in range(2)]
        base = replace(EMBED, hedge_after_s=NEVER_S)
        async with cluster(tmp_path, *workers, base=base) as front:
            for _ in range(4):
                assert (await front.ask(ASK)).status == 200
            assert sum(len(worker.requests) for worker in workers) == 4
            await settled(front, won=0, lost=0)

        talkers = [Worker(silent, f"chat-{n}") for n in range(2)]
        (tmp_path / "chat").mkdir()
        base = replace(ROUTES, hedge_after_s=0.001)
        async with cluster(tmp_path / "chat", *talkers, base=base) as front, asyncio.TaskGroup() as group:
            group.create_task(front.ask(post(chat())))
            await until(lambda: any(worker.requests for worker in talkers))
            polls = talkers[0].polls
            await until(lambda: talkers[0].polls > polls + 3)
            assert sum(len(worker.requests) for worker in talkers) == 1
            for worker in talkers:
                for exchange in worker.requests:
                    embedded(exchange)

    run(main())
