"""What a gateway holds on to, where a mistake costs memory or connections and breaks no answer."""

import contextlib
import tracemalloc
from pathlib import Path

from tests.gateway.rig import EVENT_STREAM, USAGE, Worker, chat, cluster, fronting, post, routes
from tests.net.rig import Peer, peer, run, until

from forebay.core.model import Limits
from forebay.net.connection import Connection
from forebay.net.server import Exchange, HttpServer
from forebay.wire.openai_answer import ChatAnswer, Head
from forebay.wire.transcript import TEXT_BYTES_MAX, Transcript

STREAM_BYTES = 66 * 1024 * 1024
EVENT = b"data: %b\n\n" % (b"x" * 16_384)
TAKEN_BYTES_MAX = 32 * 1024 * 1024
"""What may be on its way: mostly in two pairs of socket buffers, whose sizes are the kernel's choice."""
HELD_BYTES_MAX = 2 * 1024 * 1024
"""What this process may hold of it, worker and client included. The largest part are reads not taken apart yet."""


class Counting(HttpServer):
    """A worker's server that counts the connections it accepts."""

    accepted = 0

    def opened(self, connection: Connection) -> bool:
        self.accepted += 1
        return super().opened(connection)


class Flood:
    """Writes a stream as fast as the gateway takes it."""

    def __init__(self) -> None:
        self.written = 0
        self.paused = False
        self.exchange: Exchange

    def __call__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.source = self
        exchange.start(200, [EVENT_STREAM])
        self.resume()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        exchange = self.exchange
        self.paused = False
        while not self.paused and self.written < STREAM_BYTES:
            exchange.write(EVENT)
            self.written += len(EVENT)
        if self.written >= STREAM_BYTES:
            exchange.write(b"data: [DONE]\n\n")
            exchange.end([USAGE])


async def length(client: Peer) -> int:
    """Bytes of a stream up to its end; keeping this many would take its time."""
    size, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await client.reader.read(1 << 18)
        assert data, "the stream was cut"
        size += len(data)
        tail = tail[-4:] + data
    return size


def test_stalled_reader_of_a_long_stream_uses_bounded_memory(tmp_path: Path) -> None:
    async def main() -> None:
        flood = Flood()
        async with cluster(tmp_path, Worker(flood)) as front, peer(front.port, receive_bytes=65_536) as client:
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            client.send(post(chat(stream=True)))
            await until(lambda: flood.paused)
            written = -1
            while written != flood.written:  # until sockets are full, and everything stands still
                written = flood.written
                assert (await front.get(b"/livez")).status == 200
            held = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert flood.paused
            assert written < TAKEN_BYTES_MAX
            assert held < HELD_BYTES_MAX
            assert await length(client) >= flood.written >= STREAM_BYTES

    run(main())


def test_sequential_requests_of_many_clients_share_few_upstream_connections(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker()
        worker.server = server = Counting(worker.handle, Limits())
        await server.start("127.0.0.1", 0)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(server.close)
            front = await stack.enter_async_context(fronting(tmp_path, routes(worker)))
            await front.ready()
            clients = [await stack.enter_async_context(peer(front.port)) for _ in range(64)]
            for n in range(1000):
                client = clients[n % len(clients)]
                client.send(post(chat()))
                assert (await client.answer()).status == 200
            assert len(worker.requests) == 1000
            assert server.accepted <= 2  # one of requests, one of load polls
        await until(lambda: server.connections == 0)

    run(main())


def test_resume_state_of_a_stream_is_little_larger_than_its_text() -> None:
    chunks = ChatAnswer(Head("chatcmpl-1", 1, "chat", "r1"), stream=True)
    words = [f" {n:015d}" for n in range(4096)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    transcript = Transcript()
    transcript.feed(chunks.opening(0))
    for word in words:
        transcript.feed(chunks.delta(0, word))
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    said = transcript.state()
    assert said is not None
    assert said.text.decode() == "".join(words)
    assert kept <= 1.2 * len(said.text)
    assert len(said.text) < TEXT_BYTES_MAX
