"""What a gateway tells control of each model, and models that may be without replicas."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
from tests.gateway.rig import (
    CHAT,
    EVENT_STREAM,
    ROUTES,
    Front,
    Worker,
    chat,
    cluster,
    error_code,
    events,
    fronting,
    post,
    routes,
    whole,
    working,
)
from tests.net.rig import peer, run, until

from forebay.core.model import Condition, Endpoint, Policy, StandIn
from forebay.core.pressure import Pressure, TrafficCounters
from forebay.net.server import Exchange


async def reported_pressure(front: Front) -> Pressure:
    """What control would hear."""
    own = msgspec.json.decode((Path(front.spec.peers_dir) / f"{front.spec.id}.json").read_bytes(), type=Endpoint)
    async with peer(own.port) as client:
        client.send(b"GET /pressure HTTP/1.1\r\nhost: a\r\n\r\n")
        return msgspec.json.decode((await client.answer()).body, type=Pressure)


async def until_reported(front: Front, **figures: int) -> TrafficCounters:
    """The figures of `chat`, as soon as these are as wanted."""
    async with asyncio.timeout(10):
        while True:
            found = (await reported_pressure(front)).models["chat"]
            if all(getattr(found, name) == value for name, value in figures.items()):
                return found
            await asyncio.sleep(0.005)


async def _until_longer(front: Front, stay_s: float) -> None:
    while (await reported_pressure(front)).models["chat"].stay_s <= stay_s:
        await asyncio.sleep(0.005)


def test_every_request_counts_once_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        held: list[Exchange] = []
        worker = Worker()
        async with cluster(tmp_path, worker) as front:
            assert (await reported_pressure(front)).models["chat"] == replace(
                TrafficCounters(), ttft=(0,) * 18, tpot=(0,) * 17
            )
            await front.ask(post(chat()))
            done = await until_reported(front, completions=1)
            assert (done.arrivals, done.refused, done.waiting) == (1, 0, 0)
            assert (done.prompt_tokens, done.output_tokens) == (7, 3)
            worker.answer = held.append
            async with peer(front.port) as client:
                client.send(post(chat()))
                under_way = await until_reported(front, arrivals=2)
                assert under_way.prompt_tokens > done.prompt_tokens
                await asyncio.wait_for(_until_longer(front, under_way.stay_s), 10)
            gone = await until_reported(front, arrivals=2, completions=1)
            assert gone.stay_s > under_way.stay_s
            worker.answer = events
            await front.ask(post(chat(stream=True)))
            streamed = await until_reported(front, arrivals=3, completions=2)
            assert sum(streamed.ttft) == 1

    run(main())


def test_queued_and_rejected_requests_are_reported(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path, replace(ROUTES, queue_max=1)) as front, peer(front.port) as client:
            client.send(post(chat()))
            waits = await until_reported(front, waiting=1)
            assert waits.waiting_tokens > 0
            assert error_code(await front.ask(post(chat()))) == "queue_full"
            assert (await reported_pressure(front)).models["chat"].arrivals == 2
            assert (await reported_pressure(front)).models["chat"].refused == 1

    run(main())


def test_latency_is_predicted_from_finished_streams(tmp_path: Path) -> None:
    def long(exchange: Exchange) -> None:
        exchange.start(200, [EVENT_STREAM])
        exchange.write(b'data: {"n":0}\n\n')
        exchange.write(b"data: [DONE]\n\n")
        exchange.end([(b"x-forebay-usage", b"7,20,2")])

    async def main() -> None:
        worker = Worker(long)
        async with cluster(tmp_path, worker, base=replace(ROUTES, policy=Policy.CPR)) as front:
            for done in range(3):
                found = await until_reported(front, completions=done)
                assert (found.predicted_ttft_s, found.predicted_tpot_s) == (None, None)
                await front.ask(post(chat(stream=True)))
            found = await until_reported(front, completions=3)
            assert found.predicted_ttft_s is not None
            assert found.predicted_tpot_s is not None
            worker.report = replace(worker.report, waiting=1000)
            polls = worker.polls
            async with asyncio.timeout(10):
                while worker.polls < polls + 2:
                    await asyncio.sleep(0.005)
            behind = (await reported_pressure(front)).models["chat"].predicted_ttft_s
            assert behind is not None
            assert behind > 100 * found.predicted_ttft_s

    run(main())


def test_request_served_by_a_fallback_counts_for_the_requested_model(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(model="other", replica="other-0")
        async with (
            working(worker),
            fronting(
                tmp_path,
                replace(ROUTES, fallback=(StandIn("other", (Condition.DOWN,)),), on_demand=True),
                routes(worker, base=replace(ROUTES, name="other")),
            ) as front,
        ):
            await front.ready()
            assert (await front.ask(post(chat()))).status == 200
            found = (await reported_pressure(front)).models
            assert (found["chat"].arrivals, found["chat"].refused, found["chat"].completions) == (1, 1, 0)
            assert (found["other"].arrivals, found["other"].completions) == (1, 1)

    run(main())


def test_time_in_the_queue_of_a_model_stays_there_when_its_fallback_takes_over(tmp_path: Path) -> None:
    async def main() -> None:
        held: list[Exchange] = []
        worker, other = Worker(held.append), Worker(model="other", replica="other-0")
        worker.report = replace(worker.report, capacity=1)
        base = replace(ROUTES, fallback=(StandIn("other"),), queue_max=1, queue_timeout_s=600.0)
        async with (
            working(worker, other),
            fronting(tmp_path, routes(worker, base=base), routes(other, base=replace(ROUTES, name="other"))) as front,
            peer(front.port) as waits,
            asyncio.TaskGroup() as group,
        ):
            await until(lambda: worker.polls > 1 < other.polls)
            running = [group.create_task(front.ask(post(chat()))) for _ in range(3)]
            await until(lambda: len(held) == 3)
            waits.send(post(chat()))
            start = await until_reported(front, waiting=1)
            await asyncio.wait_for(_until_longer(front, start.stay_s + 1.0), 10)
            before = (await reported_pressure(front)).models["chat"]
            urgent = group.create_task(front.ask(post(chat(), CHAT, b"x-forebay-priority: interactive")))
            assert (await waits.answer()).headers[b"x-forebay-dispatch"] == b"chat is saturated"
            assert (await reported_pressure(front)).models["chat"].stay_s >= before.stay_s
            waited_s = [
                await front.metric(f'forebay_queue_wait_seconds_sum{{model="{name}"}}') for name in ("chat", "other")
            ]
            assert waited_s[0] > waited_s[1]
            worker.answer = whole
            for exchange in held:
                whole(exchange)
            assert {(await each).status for each in (*running, urgent)} == {200}

    run(main())


def test_a_model_without_replicas_on_demand_is_ready_and_its_requests_wait(tmp_path: Path) -> None:
    async def main() -> None:
        worker, base = Worker(), replace(ROUTES, on_demand=True)
        async with working(worker), fronting(tmp_path, base) as front, peer(front.port) as client:
            await front.ready()
            client.send(post(chat()))
            await until_reported(front, waiting=1)
            assert (await front.get(b"/readyz")).status == 200
            front.write(routes(worker, base=base))
            assert (await client.answer()).status == 200

    run(main())


def test_a_queue_timeout_during_a_cold_start_names_the_start_time(tmp_path: Path) -> None:
    async def main() -> None:
        base = replace(ROUTES, on_demand=True, start_s=90.5, queue_timeout_s=0.05)
        async with fronting(tmp_path, base) as front:
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer), answer.headers[b"retry-after"]) == (503, "no_replica", b"91")
            assert b"ready after about 91 s" in answer.body

    run(main())
