"""What the gateway does when replicas fail, lie, stall or are missing, and when clients leave."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.gateway.rig import (
    EVENT_STREAM,
    RETRYABLE,
    ROUTES,
    USAGE,
    Worker,
    chat,
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
from tests.net.rig import Script, Told, peer, run, scripted, until

from forebay.core.model import Limits, Replica, ReplicaState, Snapshot
from forebay.net.server import Exchange, Handler


def closing(exchange: Exchange) -> None:
    """Close the connection unanswered."""
    exchange.abort()


def dying(exchange: Exchange) -> None:
    """Begin a stream and die."""
    exchange.start(200, [EVENT_STREAM])
    exchange.write(b"data: 1\n\ndata: unfini")
    exchange.abort()


def half(exchange: Exchange) -> None:
    """Promise a whole answer and send half of it."""
    exchange.start(200, [(b"content-type", b"application/json")])
    exchange.write(b'{"object":')
    exchange.abort()


DONE = b"data: [DONE]\n\n"
BUSY = failing(503, "overloaded", RETRYABLE)


@pytest.mark.parametrize("bad", [closing, half, BUSY])
def test_failure_before_the_first_byte_is_retried_on_another_replica(tmp_path: Path, bad: Handler) -> None:
    async def main() -> None:
        workers = [Worker(bad, f"chat-{n}") for n in range(2)] + [Worker(whole, "chat-2")]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            for _ in range(6):
                answer = await front.ask(post(chat()))
                assert (answer.status, answer.headers[b"x-forebay-replica"]) == (200, b"chat-2")
            for worker in workers[:2]:
                ids = [exchange.header(b"x-request-id") for exchange in worker.requests]
                assert len(ids) == len(set(ids))
            assert workers[2].bodies == [chat()] * 6
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 6
            await until(lambda: len(front.lines()) == 6)
            assert all(line.get("retries", 0) <= 2 for line in front.lines())

    run(main())


def test_replica_refusing_connections_is_excluded_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        good, gone = Worker(whole, "chat-0"), Worker(whole, "chat-1")
        async with cluster(tmp_path, good, gone, load_poll_s=3.0) as front:
            await until(lambda: bool(gone.polls and good.polls))
            gone.server.close()
            for _ in range(4):
                assert (await front.ask(post(chat()))).status == 200
            assert not gone.requests
            assert await front.metric('forebay_retries_total{model="chat",reason="connect"}') <= 1
            assert await front.metric('forebay_replica_up{model="chat",replica="chat-1"}') == 0

    run(main())


def test_invalid_http_from_a_replica_is_retried_on_another(tmp_path: Path) -> None:
    async def main() -> None:
        good = Worker(whole, "chat-0", generation=1)
        load = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
        async with working(good):
            liar = msgspec.json.encode(replace(good.report, replica="chat-1"))
            script = Script([load % (len(liar), liar)] * 1000, [b"garbage\r\n\r\n"])
            async with scripted(script) as port:
                bad = Replica("chat-1", 1, "r1", "127.0.0.1", port, ReplicaState.READY)
                models = replace(ROUTES, replicas=(good.row(), bad))
                async with fronting(tmp_path, models) as front:
                    await front.ready()
                    await until(lambda: len(script.reads) > 2)
                    for _ in range(3):
                        assert (await front.ask(post(chat()))).status == 200
                    assert any(read.startswith(b"POST") for read in script.reads)

    run(main())


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_request"), (500, "internal_error"), (503, "overloaded"), (429, "queue_full")]
)
def test_an_answer_that_is_not_marked_retryable_is_final(tmp_path: Path, status: int, code: str) -> None:
    async def main() -> None:
        workers = [Worker(failing(status, code), f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front:
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer)) == (status, code)
            assert sum(len(worker.requests) for worker in workers) == 1

    run(main())


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [(closing, 502, "replica_lost"), (BUSY, 503, "overloaded"), (half, 502, "replica_lost")],
)
def test_last_error_is_returned_when_every_replica_has_failed(
    tmp_path: Path, bad: Handler, status: int, code: str
) -> None:
    async def main() -> None:
        workers = [Worker(bad, f"chat-{n}") for n in range(3)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer)) == (status, code)
            assert b"retry-after" in answer.headers
            assert [len(worker.requests) for worker in workers] == [1, 1, 1]

    run(main())


def test_retries_per_request_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(closing, f"chat-{n}") for n in range(4)]
        async with cluster(tmp_path, *workers, retries_max=1) as front:
            await until(lambda: all(worker.polls for worker in workers))
            assert (await front.ask(post(chat()))).status == 502
            assert sum(len(worker.requests) for worker in workers) == 2

    run(main())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failure_without_another_replica_is_not_counted_as_a_retry(tmp_path: Path, replicas: int) -> None:
    async def main() -> None:
        workers = [Worker(BUSY, f"chat-{n}") for n in range(replicas)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            for _ in range(3):
                answer = await front.ask(post(chat()))
                assert (answer.status, error_code(answer)) == (503, "overloaded")
            assert sum(len(worker.requests) for worker in workers) == 3 * replicas
            retried = await front.metric('forebay_retries_total{model="chat",reason="overloaded"}')
            assert retried == 3 * (replicas - 1)
            await until(lambda: len(front.lines()) == 3)
            assert [line.get("retries", 0) for line in front.lines()] == [replicas - 1] * 3

    run(main())


def test_without_another_replica_the_error_is_immediate_and_spends_no_retry_budget(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(BUSY)) as front:
            for _ in range(60):  # the budget is 30, and a fifth of these
                assert (await front.ask(post(chat()))).status == 503
            assert (
                await front.metric('forebay_queue_wait_seconds_sum{model="chat"}') < 0.1
            )  # none has waited for a tick

    run(main())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"code":"request_failed","message":"It fails now and then."}}', "It fails now and then."),
        (b'{"error":{"code":"request_failed"}}', "The engine failed on this request; it serves others."),
        (b'{"error":{"code":"request_failed","message":7}}', "The replica has no room for another request."),
        (b'{"error":{"code":"overloaded","message":"%b"}}' % (b"x" * 5000), "x" * 1024),
        (b"no JSON", "The replica has no room for another request."),
    ],
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages"])
def test_the_error_text_of_the_last_replica_reaches_the_client(
    tmp_path: Path, path: bytes, body: bytes, text: str
) -> None:
    def refusing(exchange: Exchange) -> None:
        exchange.respond(503, [(b"content-type", b"application/json"), RETRYABLE], body)

    async def main() -> None:
        async with cluster(tmp_path, Worker(refusing)) as front:
            answer = await front.ask(post(chat(max_tokens=1), path))
            assert answer.status == 503
            assert msgspec.json.decode(answer.body)["error"]["message"] == text

    run(main())


def test_stream_of_a_dead_replica_ends_in_an_error_event_without_done(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(dying)) as front, peer(front.port) as client:
            client.send(post(chat(stream=True)))
            data = await client.rest()
            assert b"data: 1\n\n" in data
            assert b"unfini" not in data
            error = msgspec.json.decode(data[data.index(b'data: {"error"') + 6 :].split(b"\n\n")[0])
            assert error["error"]["code"] == "stream_interrupted"
            assert b"[DONE]" not in data
            assert not data.endswith(b"0\r\n\r\n")
            assert await front.metric('forebay_requests_total{code="stream_interrupted",model="chat"}') == 1

    run(main())


def test_in_stream_error_of_a_worker_is_not_repeated(tmp_path: Path) -> None:
    def failing_midway(exchange: Exchange) -> None:
        exchange.start(200, [EVENT_STREAM])
        exchange.write(b"data: 1\n\n")
        exchange.write(
            b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"engine_failed"}}\n\n'
        )
        exchange.abort()

    async def main() -> None:
        async with cluster(tmp_path, Worker(failing_midway)) as front, peer(front.port) as client:
            client.send(post(chat(stream=True)))
            data = await client.rest()
            assert data.count(b'"error"') == 1
            assert not data.endswith(b"0\r\n\r\n")
            assert await front.metric('forebay_requests_total{code="engine_failed",model="chat"}') == 1

    run(main())


def test_a_replica_that_stops_answering_loses_its_requests_to_others_or_interrupts_them(tmp_path: Path) -> None:
    async def main() -> None:
        held: list[Exchange] = []
        turns = itertools.count()

        def stall(exchange: Exchange) -> None:
            held.append(exchange)
            if next(turns) == 0:
                exchange.start(200, [EVENT_STREAM])
                exchange.write(b"data: 1\n\n")

        stalled = Worker(stall, "chat-0")
        async with (
            cluster(tmp_path, stalled, replica_timeout_s=0.3) as front,
            peer(front.port) as begun,
            peer(front.port) as waiting,
        ):
            begun.send(post(chat(stream=True)))
            await read_until(begun, b"data: 1\n\n")
            waiting.send(post(chat()))
            await until(lambda: len(held) == 2)
            other = Worker(whole, "chat-1")
            async with working(other):
                front.write(routes(stalled, other))
                stalled.mute = True
                assert (await waiting.answer()).headers[b"x-forebay-replica"] == b"chat-1"
                assert b"stream_interrupted" in await begun.rest()
                await until(lambda: all(exchange.finished for exchange in held))
                stalled.mute = False  # it comes back
                stalled.answer = whole
                polls = stalled.polls
                await until(lambda: stalled.polls > polls + 1)
                for _ in range(4):
                    assert (await front.ask(post(chat()))).status == 200
                assert len(stalled.requests) > 2

    run(main())


@pytest.mark.parametrize("lie", [{"generation": 2}, {"model": "other"}, {"replica": "chat-9"}])
def test_a_replica_that_is_not_the_one_expected_gets_no_request(tmp_path: Path, lie: dict[str, object]) -> None:
    async def main() -> None:
        liar, good = Worker(whole, "chat-0"), Worker(whole, "chat-1")
        liar.report = replace(liar.report, **lie)  # type: ignore[arg-type]
        async with cluster(tmp_path, liar, good) as front:
            for _ in range(4):
                assert (await front.ask(post(chat()))).headers[b"x-forebay-replica"] == b"chat-1"
            assert liar.polls
            assert not liar.requests

    run(main())


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.QUARANTINED])
def test_control_can_take_a_replica_out_of_service(tmp_path: Path, state: ReplicaState) -> None:
    async def main() -> None:
        out, good = Worker(whole, "chat-0", state=state), Worker(whole, "chat-1")
        async with cluster(tmp_path, out, good) as front:
            for _ in range(4):
                assert (await front.ask(post(chat()))).status == 200
            assert not out.requests

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_cancels_the_work_at_once(tmp_path: Path, begun: bool) -> None:
    gone: list[int] = []

    def hold(exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: gone.append(1)
        if begun:
            exchange.start(200, [EVENT_STREAM])
            exchange.write(b"data: 1\n\n")

    async def main() -> None:
        worker = Worker(hold)
        async with cluster(tmp_path, worker) as front:
            async with peer(front.port) as client:
                client.send(post(chat(stream=True)))
                await until(lambda: bool(worker.requests))
                if begun:
                    await read_until(client, b"data: 1\n\n")
            await until(lambda: gone == [1])
            assert await front.metric('forebay_in_flight{model="chat"}') == 0
            assert await front.metric('forebay_requests_total{code="client_closed",model="chat"}') == 1

    run(main())


def test_a_client_that_is_disconnected_because_it_does_not_read_counts_as_a_slow_consumer(tmp_path: Path) -> None:
    def flood(exchange: Exchange) -> None:
        exchange.start(200, [EVENT_STREAM])
        exchange.write(b"data: 1\n\n" * 1_000_000)

    async def main() -> None:
        limits = Limits(write_timeout_s=0.2)
        async with (
            cluster(tmp_path, Worker(flood), limits=limits) as front,
            peer(front.port, receive_bytes=4096) as client,
        ):
            client.send(post(chat(stream=True)))
            await until(lambda: bool(front.lines()))
            assert [(line["status"], line["code"]) for line in front.lines()] == [(408, "slow_consumer")]
            assert await front.metric('forebay_requests_total{code="slow_consumer",model="chat"}') == 1
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_a_client_that_leaves_after_the_last_event_was_served(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(lambda _: None)
        async with cluster(tmp_path, worker) as front:
            async with peer(front.port) as client:
                client.send(post(chat(stream=True)))
                await until(lambda: bool(worker.requests))
                worker.requests[0].start(200, [EVENT_STREAM])
                worker.requests[0].write(b"data: 1\n\ndata: [DONE]\n\n")
                await read_until(client, b"[DONE]\n\n")
            async with asyncio.timeout(10):
                while await front.metric("forebay_open_connections") > 1:
                    await asyncio.sleep(0.002)
            assert not worker.requests[0].finished
            worker.requests[0].end([USAGE])
            await until(lambda: bool(front.lines()))
            assert (front.lines()[0]["code"], front.lines()[0]["completion_tokens"]) == ("ok", 3)

    run(main())


def test_slow_reader_applies_backpressure_to_the_worker(tmp_path: Path) -> None:
    told: list[str] = []

    def hold(exchange: Exchange) -> None:
        exchange.source = Told(told)
        exchange.start(200, [EVENT_STREAM])

    async def main() -> None:
        worker = Worker(hold)
        async with cluster(tmp_path, worker) as front, peer(front.port, receive_bytes=4096) as client:
            client.send(post(chat(stream=True)))
            await until(lambda: bool(worker.requests))
            exchange, written = worker.requests[0], 0
            while not told:
                exchange.write(b"data: %b\n\n" % (b"x" * 10_000))
                written += 10_008
                assert written < 100_000_000
                await asyncio.sleep(0)
            reading = asyncio.gather(client.answer())
            await until(lambda: told == ["pause", "resume"])
            exchange.write(DONE)
            exchange.end()
            assert len((await reading)[0].body) == written + len(DONE)

    run(main())


def test_connections_to_a_worker_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker) as front, peer(front.port) as client:
            most = 0
            for handler in (whole, events) * 20:
                worker.answer = handler
                client.send(post(chat()))
                assert (await client.answer()).status == 200
                most = max(most, worker.server.connections)
            assert most <= 2  # one of requests, one of load polls

    run(main())


@pytest.mark.parametrize("broken", [b"", b"{", b'{"version": "x"}', b"\xff"])
def test_a_broken_or_missing_snapshot_changes_nothing(tmp_path: Path, broken: bytes) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker) as front:
            path = Path(front.spec.snapshot_path)
            for change in (lambda: path.write_bytes(broken), path.unlink):
                change()
                seen = worker.polls
                await until(lambda seen=seen: worker.polls > seen + 10)  # type: ignore[misc]
                assert (await front.ask(post(chat()))).status == 200
            other = Worker(whole, "chat-1")
            async with working(other):
                front.write(routes(other))
                await until(lambda: other.polls > 0)
                assert (await front.ask(post(chat()))).status == 200

    run(main())


def test_a_snapshot_of_an_older_epoch_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        worker, other = Worker(), Worker(whole, "chat-1")
        async with cluster(tmp_path, worker) as front, working(other):
            path = Path(front.spec.snapshot_path)
            for version, epoch, at in ((5, 5, worker), (9, 4, other)):
                path.write_bytes(msgspec.json.encode(Snapshot(version, (routes(at),), epoch=epoch)))
                seen = worker.polls
                await until(lambda seen=seen: worker.polls > seen + 60)  # type: ignore[misc]
            assert other.polls == 0
            assert (await front.ask(post(chat()))).headers[b"x-forebay-replica"] == b"chat-0"
            path.write_bytes(msgspec.json.encode(Snapshot(1, (routes(other),), epoch=6)))
            await until(lambda: other.polls > 0)

    run(main())


def test_gateway_without_a_snapshot_does_not_report_models_as_unknown(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path) as front:
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer)) == (503, "no_replica")
            assert (await front.get(b"/readyz")).status == 503

    run(main())


def test_replaced_replica_finishes_its_requests_and_gets_no_new_ones(tmp_path: Path) -> None:
    async def main() -> None:
        old = Worker(lambda _: None)
        async with cluster(tmp_path, old) as front, peer(front.port) as client:
            client.send(post(chat()))
            await until(lambda: bool(old.requests))
            new = Worker(whole, generation=2)
            async with working(new):
                front.write(routes(new))
                await until(lambda: new.polls > 1)
                assert (await front.ask(post(chat()))).status == 200
                whole(old.requests[0])
                assert (await client.answer()).status == 200
                assert len(old.requests) == 1
                await until(lambda: old.server.connections == 0)

    run(main())
