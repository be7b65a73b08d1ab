"""Waiting for a replica, draining, and several gateways at once."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.rig import (
    CHAT,
    EVENT_STREAM,
    RETRYABLE,
    ROUTES,
    Front,
    Worker,
    chat,
    closed_port,
    cluster,
    error_code,
    events,
    failing,
    fronting,
    post,
    read_until,
    routes,
    whole,
    working,
)
from tests.net.rig import peer, run, until

from forebay.core.model import LoadReport, Replica, ReplicaState
from forebay.gateway import serve
from forebay.gateway.account import Account
from forebay.gateway.fleet import Served
from forebay.net.client import Pool
from forebay.net.server import Exchange
from forebay.obs.metrics import Metrics

STOPPED = b"The gateway is shutting down, and its grace period is over"


def test_queued_requests_are_served_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker()
        async with (
            working(worker),
            fronting(tmp_path, ROUTES) as front,
            peer(front.port) as first,
            peer(front.port) as second,
        ):
            first.send(post(chat(n=1)))
            await _queued(front, 1)
            second.send(post(chat(n=2)))
            await _queued(front, 2)
            front.write(routes(worker))
            assert (await first.answer()).status == (await second.answer()).status == 200
            assert worker.bodies == [chat(n=1), chat(n=2)]
            assert await front.metric('forebay_queue_wait_seconds_count{model="chat"}') == 2

    run(main())


async def _queued(front: Front, depth: int) -> None:
    async with asyncio.timeout(10):
        while await front.metric('forebay_queue_depth{model="chat"}') != depth:
            await asyncio.sleep(0.002)


def test_a_full_queue_refuses_with_retry_after_and_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path, replace(ROUTES, queue_max=1)) as front:
            async with peer(front.port) as client:
                client.send(post(chat()))
                await _queued(front, 1)
                answer = await front.ask(post(chat()))
                assert (answer.status, error_code(answer)) == (429, "queue_full")
                assert 1 <= int(answer.headers[b"retry-after"]) <= 60
            await _queued(front, 0)
            assert await front.metric('forebay_requests_total{code="client_closed",model="chat"}') == 1

    run(main())


def test_a_request_that_finds_the_only_replica_draining_waits_for_its_successor(tmp_path: Path) -> None:
    leaving = Worker()

    def stopping(exchange: Exchange) -> None:
        leaving.report = replace(leaving.report, state=ReplicaState.DRAINING)
        failing(503, "draining", RETRYABLE)(exchange)

    async def main() -> None:
        leaving.answer = stopping
        following = Worker(replica="chat-1")
        async with cluster(tmp_path, leaving) as front, working(following), peer(front.port) as client:
            client.send(post(chat()))
            await _queued(front, 1)
            front.write(routes(following))
            assert (await client.answer()).status == 200

    run(main())


def test_after_a_draining_refusal_the_new_snapshot_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "TICK_S", 3600.0)  # it has no other occasion to look
    leaving = [Worker(replica=f"chat-{number}") for number in range(5)]
    staying = Worker(replica="chat-5")

    async def main() -> None:
        async with cluster(tmp_path, *leaving, staying) as front:
            for worker in leaving:
                worker.answer = failing(503, "draining", RETRYABLE)
            front.write(routes(staying))
            answers = [await front.ask(post(chat())) for _ in range(3)]
            assert [answer.status for answer in answers] == [200, 200, 200]

    run(main())


@pytest.mark.parametrize("generation", [1, 2])
def test_a_request_that_lost_every_replica_waits_for_their_successors(tmp_path: Path, generation: int) -> None:
    dying = [Worker(replica="chat-0"), Worker(replica="chat-1")]

    def dies(exchange: Exchange) -> None:
        for worker in dying:  # nobody knows it from a load report
            worker.mute = True
        exchange.abort()

    async def main() -> None:
        following = Worker(replica="chat-0", generation=generation)
        async with cluster(tmp_path, *dying) as front, working(following), peer(front.port) as client:
            for worker in dying:
                worker.answer = dies
            client.send(post(chat()))
            await _queued(front, 1)
            assert [len(worker.requests) for worker in dying] == [1, 1]
            front.write(routes(following))
            assert (await client.answer()).status == 200

    run(main())


@pytest.mark.parametrize("reason", ["connect", "lost"])
def test_a_load_report_that_was_asked_for_before_a_connection_broke_is_no_sign_of_life(reason: str) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            served = Served(ROUTES, Account(Metrics(), "chat"))
            link = served.link(
                Replica("chat-0", 1, "r", "127.0.0.1", 1, ReplicaState.READY), Pool("127.0.0.1", 1, group)
            )
            served.links, report = [link], LoadReport("chat-0", 1, "chat", "r", ReplicaState.READY, capacity=4)
            served.apply_report(link, report, 0, 4.0, 4.1)
            link.broke_off(reason, 5.0)
            served.apply_report(link, report, 0, 4.9, 5.1)
            assert served.doubt_lost([("chat-0", 1)]) == (reason == "lost")
            served.apply_report(link, report, 0, 5.0, 5.2)
            assert not link.live
            served.apply_report(link, report, 0, 5.2, 5.3)
            assert link.live
            assert not served.doubt_lost([("chat-0", 1)])

    run(main())


def test_queued_request_times_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path, replace(ROUTES, queue_timeout_s=0.05)) as front:
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer)) == (503, "no_replica")
            assert b"retry-after" in answer.headers

    run(main())


def test_replica_load_never_exceeds_its_room_and_all_requests_are_served(tmp_path: Path) -> None:
    held: list[Exchange] = []
    most = 0

    def hold(exchange: Exchange) -> None:
        nonlocal most
        held.append(exchange)
        most = max(most, len(held))

    async def main() -> None:
        worker = Worker(hold)
        worker.report = replace(worker.report, capacity=4)
        base = replace(ROUTES, queue_max=100)
        async with cluster(tmp_path, worker, base=base) as front, asyncio.TaskGroup() as group:
            asks = [group.create_task(front.ask(post(chat(n=n)))) for n in range(30)]
            await until(lambda: len(held) == 6)
            await _queued(front, 24)
            while not all(ask.done() for ask in asks):
                if held:
                    whole(held.pop(0))
                await asyncio.sleep(0)
            assert all(ask.result().status == 200 for ask in asks)
        assert most == 6

    run(main())


def test_removed_model_rejects_its_queued_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path, ROUTES) as front, peer(front.port) as client:
            client.send(post(chat()))
            await _queued(front, 1)
            front.write(replace(ROUTES, name="other"))
            assert error_code(await client.answer()) == "model_not_found"
            assert error_code(await front.ask(post(chat()))) == "model_not_found"

    run(main())


def test_draining_finishes_streams_and_waiting_requests_then_stops(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(lambda _: None)
        async with cluster(tmp_path, worker) as front, peer(front.port) as client, peer(front.port) as idle:
            client.send(post(chat(stream=True)))
            await until(lambda: bool(worker.requests))
            front.signals.put_nowait(15)
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                await front.get(b"/livez")
            assert not front.done.done()
            events(worker.requests[0])
            assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
            await until(front.done.done)

    run(main())


def test_second_signal_ends_draining_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(lambda _: None)
        async with cluster(tmp_path, worker) as front, peer(front.port) as client:
            client.send(post(chat(stream=True)))
            await until(lambda: bool(worker.requests))
            front.signals.put_nowait(15)
            front.signals.put_nowait(15)
            await until(front.done.done)
            told = await client.rest()
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"draining"' in told
            assert STOPPED + b"; retry the request." in told

    run(main())


@pytest.mark.parametrize("path", [CHAT, b"/v1/messages", b"/v1/responses"])
def test_stream_cut_by_a_stopping_gateway_ends_in_an_error_event(tmp_path: Path, path: bytes) -> None:
    async def main() -> None:
        worker = Worker(lambda _: None)
        async with cluster(tmp_path, worker) as front, peer(front.port) as client:
            client.send(post(chat(stream=True), path))
            await until(lambda: bool(worker.requests))
            worker.requests[0].start(200, [EVENT_STREAM])
            worker.requests[0].write(b'data: {"n":1}\n\n')
            await read_until(client, b"\n\n\r\n")
            front.signals.put_nowait(15)
            front.signals.put_nowait(15)
            told = await client.rest()
            assert b'"code":"stream_interrupted"' in told
            assert STOPPED + b"; the response is incomplete. Retry the request." in told

    run(main())


def test_stream_of_a_removed_model_ends_in_an_error_event_when_the_gateway_stops(tmp_path: Path) -> None:
    async def main() -> None:
        worker, other = Worker(), Worker(replica="other-0", model="other")
        base = replace(ROUTES, name="other")
        async with working(worker, other), fronting(tmp_path, routes(worker), routes(other, base=base)) as front:
            await until(lambda: worker.polls > 1 < other.polls)
            worker.answer = lambda exchange: exchange.start(200, [EVENT_STREAM], b'data: {"n":1}\n\n')
            async with peer(front.port) as client:
                client.send(post(chat(stream=True)))
                await read_until(client, b"\n\n\r\n")
                front.write(routes(other, base=base))
                async with asyncio.timeout(10):
                    while b'"id":"chat"' in (await front.get(b"/v1/models")).body:
                        await asyncio.sleep(0.005)
                front.signals.put_nowait(15)
                front.signals.put_nowait(15)
                assert b'"code":"stream_interrupted"' in await client.rest()
            await until(front.done.done)
            assert [line["code"] for line in front.lines() if line["status"] == 200] == ["stream_interrupted"]

    run(main())


def test_metrics_scrape_aggregates_live_gateway_processes(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker()
        async with (
            cluster(tmp_path, worker) as one,
            fronting(tmp_path, routes(worker), id="gateway-1") as two,
        ):
            await two.ready()
            peers = tmp_path / "peers"
            (peers / "gateway-2.json").write_bytes(b'{"pid":%d,"host":"127.0.0.1","port":%d}' % (1, closed_port()))
            (peers / "gateway-3.json").write_bytes(b'{"pid":4194303,"host":"127.0.0.1","port":1}')
            (peers / "gateway-4.json").write_bytes(b"{")
            for front in (one, one, two):
                await front.ask(post(chat()))
            for front in (one, two):
                assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 3
                assert await front.metric('forebay_request_duration_seconds_count{model="chat"}') == 3
                assert await front.metric('forebay_replica_up{model="chat",replica="chat-0"}') == 2
                for number, count in enumerate((2, 1)):
                    line = b'forebay_requests_total{gateway="gateway-%d",code="ok",model="chat"} %d.0\n' % (
                        number,
                        count,
                    )
                    assert line in (await front.get(b"/metrics")).body

    run(main())
