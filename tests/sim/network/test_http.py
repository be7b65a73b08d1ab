"""The real HTTP server and client over the simulated network, unmodified."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import pytest
from tests.net.rig import Log, Told, echo, get, post
from tests.sim.network.recording_protocol import HOST, PORT, on
from tests.sim.virtual import elapse

from forebay.core.model import Limits
from forebay.net.client import Pool
from forebay.net.server import Exchange, Handler, HttpServer
from forebay.sim.network.links import ANY, Shape
from forebay.sim.network.network import Network

REPEATS = 30


class Stream:
    """A handler that starts an answer and lets the test go on with it."""

    def __init__(self) -> None:
        self.exchange: Exchange
        self.said: list[str] = []

    def __call__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.on_disconnect = lambda: self.said.append("gone")
        exchange.source = Told(self.said)
        exchange.start(200, [])
        exchange.write(b"begun")


@asynccontextmanager
async def both(
    network: Network, handler: Handler, *, limits: Limits | None = None
) -> AsyncIterator[tuple[HttpServer, Pool]]:
    """A server on node b and a pool on node a."""
    server = HttpServer(handler, limits or Limits())
    with network.node("b"):
        await server.start(HOST, PORT)
    async with asyncio.TaskGroup() as group:
        with network.node("a"):
            pool = Pool(HOST, server.port, group)
            try:
                yield server, pool
            finally:
                pool.close()
                server.close()


async def asked(pool: Pool, request: bytes) -> Log:
    """The answer, whole or not."""
    log = Log()
    pool.call(request, log)
    while not log.done:
        await elapse(0.01)
    return log


@pytest.mark.parametrize("chop", [False, True])
def test_requests_are_answered_over_one_connection_that_is_kept(chop: bool) -> None:
    network = Network(Random(2), chop=chop)

    async def main() -> None:
        async with both(network, echo) as (server, pool):
            for size in (0, 1, 100_000):
                log = await asked(pool, post(b"x" * size))
                assert (log.status, log.body) == (200, b"POST / %d %b" % (size, b"x" * size))
                assert dict(log.headers)[b"date"] == b"Thu, 01 Jan 2026 00:00:00 GMT"
            assert (network.connections, server.connections, pool.connections) == (1, 1, 1)
        await elapse(1)
        assert network.connections == 0

    on(network, main)


def test_slow_reader_slows_down_the_stream() -> None:
    network, stream = Network(Random(2)), Stream()

    async def main() -> None:
        async with both(network, stream, limits=Limits(stream_buffer_bytes_max=10_000_000)) as (_, pool):
            log = Log()
            call = pool.call(get(), log)
            await elapse(1)
            assert log.body == b"begun"
            call.pause()
            for _ in range(100):
                stream.exchange.write(b"x" * 10_000)
            await elapse(1)
            assert (log.body, stream.said) == (b"begun", ["pause"])
            call.resume()
            await elapse(1)
            assert stream.said == ["pause", "resume"]
            stream.exchange.end([(b"x-usage", b"1")])
            await elapse(1)
            assert (len(log.body), log.trailers) == (1_000_005, [(b"x-usage", b"1")])

    on(network, main)


def test_server_notices_a_client_disconnect() -> None:
    network, stream = Network(Random(2)), Stream()
    network.shape("a", "b", Shape(delay_s=0.5))

    async def main() -> None:
        async with both(network, stream) as (_, pool):
            call = pool.call(get(), Log())
            await elapse(2)
            call.cancel()
            await elapse(0.49)
            assert stream.said == []
            await elapse(0.02)
            assert stream.said == ["gone"]

    on(network, main)


def test_drain_finishes_started_requests_and_accepts_no_more() -> None:
    network, stream = Network(Random(2)), Stream()

    async def main() -> None:
        async with both(network, stream) as (server, pool):
            log, late = Log(), Log()
            pool.call(get(), log)
            await elapse(1)
            asyncio.get_running_loop().call_later(5, stream.exchange.end)
            asyncio.get_running_loop().call_later(2, pool.call, get(), late)
            assert await server.drain(60)
            assert (log.body, log.trailers) == (b"begun", [])
            assert late.error is not None
            assert (late.error.kind, asyncio.get_running_loop().time()) == ("connect", 6)

    on(network, main)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda network: network.reset("a", "b"), "Connection reset by peer."),
        (lambda network: network.kill("b"), "The connection was closed before the answer was complete."),
    ],
)
def test_client_notices_a_truncated_response(fault: Callable[[Network], None], text: str) -> None:
    network, stream = Network(Random(2)), Stream()

    async def main() -> None:
        async with both(network, stream) as (_, pool):
            log = Log()
            pool.call(get(), log)
            await elapse(1)
            fault(network)
            await elapse(1)
            assert log.error is not None
            assert (log.error.kind, log.error.sent) == ("lost", True)
            assert log.error.text.endswith(text)

    on(network, main)


def test_server_times_out_a_partitioned_client_which_notices_by_itself() -> None:
    network = Network(Random(2))

    async def main() -> None:
        async with both(network, echo) as (server, pool):
            await asked(pool, get())
            network.cut("a", "b")
            await elapse(74)
            assert server.connections == 1
            await elapse(3)
            assert (server.connections, pool.connections) == (0, 1)
            late = Log()
            pool.call(get(b"/late"), late)  # the pool finds its connection too old, and makes another
            await elapse(3)
            assert late.error is not None
            assert (late.error.kind, late.error.text) == ("connect", f"No connection to {HOST}:{PORT} within 2 s.")
            network.heal()
            assert (await asked(pool, get(b"/again"))).body == b"GET /again 0 "

    on(network, main)


def test_a_request_that_meets_an_idle_timeout_on_its_way_is_sent_again() -> None:
    network = Network(Random(2))
    network.shape("a", "b", Shape(delay_s=0.5))

    async def main() -> None:
        async with both(network, echo, limits=Limits(idle_timeout_s=5)) as (_, pool):
            await asked(pool, get())
            await elapse(5.3)
            for n in range(12):  # one of them crosses the server's goodbye
                assert (await asked(pool, get(b"/%d" % n))).body == b"GET /%d 0 " % n
                await elapse(4.5 + n / 20)

    on(network, main)


def test_clients_of_a_vanished_host_keep_waiting() -> None:
    network, stream = Network(Random(2)), Stream()

    async def main() -> None:
        async with both(network, stream) as (_, pool):
            log = Log()
            pool.call(get(), log)
            await elapse(1)
            network.vanish("b")
            await elapse(1000)
            assert (log.body, log.done) == (b"begun", False)

    on(network, main)


# --- running alike


async def _traffic(network: Network) -> str:
    """A digest of what clients and handlers see, and when, while the network gets worse and better."""
    trace: list[object] = []
    loop, rng = asyncio.get_running_loop(), Random(5)
    network.shape(ANY, ANY, Shape(delay_s=0.001, jitter_s=0.02, bytes_per_s=200_000))

    faults = (partial(network.cut, "a"), partial(network.reset, "b"), partial(network.refuse, "b"))

    def handle(exchange: Exchange) -> None:
        trace.append((loop.time(), "asked", exchange.target, exchange.peer))
        loop.call_later(rng.random() / 10, exchange.respond, 200, [], exchange.body * 2)

    async def client(pool: Pool, n: int) -> None:
        for turn in range(20):
            log = await asked(pool, post(b"x" * rng.randrange(3000), target=b"/%d/%d" % (n, turn)))
            trace.append((loop.time(), n, turn, log.status, len(log.body), str(log.error)))

    async def fail() -> None:
        for _ in range(10):
            await elapse(rng.random() / 5)
            faults[rng.randrange(len(faults))]()
            await elapse(rng.random() / 5)
            network.heal()
            network.shape(ANY, ANY, Shape(jitter_s=0.02))

    async with both(network, handle) as (_, pool), asyncio.TaskGroup() as group:
        group.create_task(fail())
        for n in range(10):
            group.create_task(client(pool, n))
    return hashlib.sha256(repr(trace).encode()).hexdigest()


def digest(seed: int = 1) -> str:
    network = Network(Random(seed), chop=True)
    return str(on(network, lambda: _traffic(network)))


def test_simulated_traffic_is_reproducible_in_one_process() -> None:
    kept = []
    for _ in range(REPEATS):
        kept.append((digest(), [object() for _ in range(997)]))  # other objects get other addresses
    assert len({hashed for hashed, _ in kept}) == 1
    assert digest(2) != digest(1)


@pytest.mark.slow
def test_simulated_traffic_is_reproducible_across_processes_and_hash_seeds() -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4294967295")
    }
    assert printed == {digest().encode()}


@pytest.mark.parametrize("ends", [lambda server: None, HttpServer.close])
def test_simultaneous_disconnects_are_delivered_in_connection_order(
    ends: Callable[[HttpServer], None],
) -> None:
    network = Network(Random(2))
    order: list[int] = []

    class Client(asyncio.Protocol):
        def __init__(self, number: int) -> None:
            self.number = number

        def connection_lost(self, exc: Exception | None) -> None:
            order.append(self.number)

    async def main() -> None:
        async with both(network, echo, limits=Limits(idle_timeout_s=5)) as (server, _):
            for n in range(50):
                await asyncio.get_running_loop().create_connection(partial(Client, n), HOST, PORT)
            ends(server)
            await elapse(10)

    on(network, main)
    assert order == list(range(50))
