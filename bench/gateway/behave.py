"""How proxies behave where a mistake costs memory, work nobody wants, or connections: pass or fail, with figures.

    python bench/gateway/behave.py [--only forebay,nginx]

- A client stops reading a stream of 66 MB: what the proxy's memory grows by.
- A client leaves, in the middle of a stream and before its first byte: how soon the model server sees its own
  connection close. It would go on generating until then.
- 1,000 requests, one after the other, over 64 connections: how many connections the model server had to accept.

The model server is this process. Figures go to behaviour.json. The exit status is 1 if Forebay fails anything.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import httptools
from processes import allow_files, await_answer, machine, memory_kb, request, started
from proxies import KEY, MOCK_PORT, PROXIES, PROXY_PORT, REPLICAS, install, version

HERE: Final = Path(__file__).parent
CHUNK: Final = (
    b'data: {"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
    b'"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}\n\n'
)
TEXT_BYTES: Final = 16_384
FLOOD_EVENTS: Final = 4096
"""66 MB of text, in large events: a proxy that parses them shall not need minutes."""
FLOOD_BYTES_MIN: Final = TEXT_BYTES * FLOOD_EVENTS
DRIP_S: Final = 0.02
STALL_S: Final = 3.0
SEGMENT_BYTES: Final = 1460
"""Of the clients' connections, as on Ethernet. With the 64 KB of loopback, kernels alone would take in megabytes."""
DRAIN_TIMEOUT_S: Final = 30.0
GONE_TIMEOUT_S: Final = 3.0
LEAVERS: Final = 10
REQUESTS: Final = 1000
CONNECTIONS: Final = 64
SLOW_READER_MB_MAX: Final = 1.0
GONE_MS_MAX: Final = 100.0
ANSWER: Final = (
    b'{"id":"chatcmpl-mock","object":"chat.completion","created":1700000000,"model":"mock","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}'
)
PLACES: Final[dict[str, dict[str, object]]] = {
    "/v1/models": {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]},
    "/load": {
        "replica": "REPLICA",
        "generation": 1,
        "model": "mock",
        "revision": "r-0",
        "state": "ready",
        "capacity": 9999,
    },
}
HEALTHY: Final[dict[str, object]] = {
    "status": "ok",
    "model_path": "mock",
    "is_generation": True,
    "served_model_name": "mock",
}


@dataclass
class Backend:
    """What the model server has seen."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """A request has come; cleared by who waits for it."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The connection of an unfinished answer was closed."""
    gone_at: float = 0.0
    used: set["Replica"] = field(default_factory=set)
    """Connections that have carried a chat request: probes have their own, and are not counted."""


class Replica(asyncio.Protocol):
    """One connection to the model server. The content of the message says how it is answered."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._left = 0
        self._busy = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # HTTP/2 without being asked, say, as some probes try it first
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._busy = False
            self._backend.gone_at = self._loop.time()
            self._backend.gone.set()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flood()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        url, body = self._url.decode(), self._body
        self._url = self._body = b""
        if self._parser.get_method() == b"GET":
            document = PLACES.get(url.partition("?")[0], HEALTHY)
            self._whole(json.dumps(document).replace("REPLICA", self._name).encode())
            return
        backend = self._backend
        backend.used.add(self)
        backend.arrived.set()
        if b'"flood"' in body:
            self._left = FLOOD_EVENTS
            self._begin()
            self._flood()
        elif b'"drip"' in body:
            self._begin()
            self._drip()
        elif b'"silence"' in body:
            self._busy = True
        elif b'"stream":true' in body.replace(b" ", b""):
            self._begin()
            self._event(b"yes")
            self._end()
        else:
            self._whole(ANSWER)

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _begin(self) -> None:
        self._busy = True
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def _event(self, text: bytes) -> None:
        data = CHUNK % text
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _end(self) -> None:
        self._busy = False
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _flood(self) -> None:
        while self._left and self._busy and not self._paused:
            self._left -= 1
            self._event(b"%0*d" % (TEXT_BYTES, self._left))  # no two alike: LiteLLM takes repetition for a loop
            if not self._left:
                self._end()

    def _drip(self) -> None:
        if self._busy:
            self._event(b"drop ")
            self._loop.call_later(DRIP_S, self._drip)


@contextlib.asynccontextmanager
async def answering(backend: Backend) -> AsyncIterator[None]:
    """The model server's replicas."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        for n in range(REPLICAS):

            def connection(name: str = f"mock-{n}") -> Replica:
                return Replica(backend, name)

            await stack.enter_async_context(await loop.create_server(connection, "127.0.0.1", MOCK_PORT + n))
        yield


def asking(how: str, *, stream: bool = True) -> bytes:
    """A request that is to be answered in some way."""
    body = {"model": "mock", "messages": [{"role": "user", "content": how}], "max_tokens": 8, "stream": stream}
    return request(json.dumps(body).encode(), KEY)


async def connected(data: bytes) -> socket.socket:
    """A raw connection to the proxy, on which this was sent."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    await loop.sock_connect(client, ("127.0.0.1", PROXY_PORT))
    await loop.sock_sendall(client, data)
    return client


async def slow_reader(pid: int, _: Backend) -> float:
    """MB that the process tree grows by while a client takes nothing of 66 MB, all of which must arrive later."""
    loop = asyncio.get_running_loop()
    with await connected(asking("hi")) as client:  # what is only ever loaded once is no cost of this reader
        await _to_end(client)
    before_kb = most_kb = memory_kb(pid, "Rss")
    with await connected(asking("flood")) as client:
        taken = len(await loop.sock_recv(client, 4096))
        until = loop.time() + STALL_S
        while loop.time() < until:
            await asyncio.sleep(0.1)
            most_kb = max(most_kb, memory_kb(pid, "Rss"))
        grown_mb = (most_kb - before_kb) / 1024
        try:
            taken += await _to_end(client)
        except TimeoutError:
            raise ValueError(f"{grown_mb:.1f} MB, and then no end of the stream") from None
    if taken < FLOOD_BYTES_MIN:
        raise ValueError(f"{grown_mb:.1f} MB, and {taken} bytes of the stream arrived")
    return grown_mb


async def _to_end(client: socket.socket) -> int:
    """Read a stream to its end, or to that of the connection; how many bytes came."""
    loop = asyncio.get_running_loop()
    taken, tail = 0, b""
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        while b"[DONE]" not in tail:
            data = await loop.sock_recv(client, 1 << 18)
            if not data:
                break
            taken += len(data)
            tail = tail[-16:] + data
    return taken


async def _leaving(how: str, read: int, backend: Backend) -> float:
    """Milliseconds until the model server sees that a client has left; the longest of several."""
    loop = asyncio.get_running_loop()
    longest_s = 0.0
    for _ in range(LEAVERS):
        backend.arrived.clear()
        backend.gone.clear()
        client = await connected(asking(how))
        await backend.arrived.wait()
        for _ in range(read):
            await loop.sock_recv(client, 65_536)
        await asyncio.sleep(0.05)
        left = loop.time()
        client.close()
        try:
            await asyncio.wait_for(backend.gone.wait(), GONE_TIMEOUT_S)
        except TimeoutError:
            raise ValueError(f"not seen within {GONE_TIMEOUT_S:g} s") from None
        longest_s = max(longest_s, backend.gone_at - left)
    return longest_s * 1000


async def left_midstream(_: int, backend: Backend) -> float:
    """Milliseconds until it is seen that a client has left in the middle of a stream; the longest of several."""
    return await _leaving("drip", 3, backend)


async def left_before_first_byte(_: int, backend: Backend) -> float:
    """The same while the model server has not answered anything."""
    return await _leaving("silence", 0, backend)


async def kept_alive(_: int, backend: Backend) -> float:
    """Connections that the model server sees for many requests, one after the other, over several connections."""
    backend.used.clear()
    loop = asyncio.get_running_loop()
    data = asking("hi", stream=False)
    async with contextlib.AsyncExitStack() as stack:
        clients: list[socket.socket] = []
        for n in range(REQUESTS):
            if n < CONNECTIONS:
                clients.append(stack.enter_context(await connected(data)))
            client = clients[n % CONNECTIONS]
            if n >= CONNECTIONS:
                await loop.sock_sendall(client, data)
            answer = b""
            while not _whole(answer):
                more = await loop.sock_recv(client, 65_536)
                if not more:
                    raise ValueError("the proxy closed a connection of the client")
                answer += more
    return len(backend.used)


def _whole(answer: bytes) -> bool:
    """Whether this is a whole answer, with a length or in chunks. Raises ValueError if it is not 200."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(head.splitlines()[0].decode())
    _, sized, length = head.lower().partition(b"content-length:")
    return len(body) >= int(length.splitlines()[0]) if sized else body.endswith(b"0\r\n\r\n")


Probe = Callable[[int, Backend], Awaitable[float]]
PROBES: Final[dict[str, tuple[Probe, float]]] = {
    "left_midstream_ms": (left_midstream, GONE_MS_MAX),
    "left_before_first_byte_ms": (left_before_first_byte, GONE_MS_MAX),
    "backend_connections": (kept_alive, CONNECTIONS),
    "slow_reader_mb": (slow_reader, SLOW_READER_MB_MAX),
}
"""Figure → what measures it, and what it may be at most. The one that has broken a proxy comes last."""


async def behaviour(name: str) -> dict[str, dict[str, object]]:
    """All figures of one proxy, each on a fresh process; `why` tells why there is none."""
    found: dict[str, dict[str, object]] = {}
    for figure, (probe, most) in PROBES.items():
        backend = Backend()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            log = place / "proxy.log"
            async with answering(backend):
                with started(PROXIES[name](place, PROXY_PORT), 0, log) as proxy:
                    await asyncio.to_thread(await_answer, PROXY_PORT, KEY, proxy, log)
                    try:
                        value = await probe(proxy.pid, backend)
                    except (ValueError, OSError) as error:
                        found[figure] = {"value": None, "passed": False, "why": str(error) or "no answer in time"}
                    else:
                        found[figure] = {"value": round(value, 2), "passed": value <= most}
        print(f"{name:14}{figure:28}{found[figure]}", flush=True)
    return found


def main() -> None:
    """Parse arguments, try every proxy, write behaviour.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PROXIES))
    parser.add_argument("--output", type=Path, default=HERE / "behaviour.json")
    options = parser.parse_args()
    names = options.only.split(",")
    install(names)
    allow_files()
    os.sched_setaffinity(0, {1})
    found = {name: asyncio.run(behaviour(name)) for name in names}
    result = {
        "machine": machine(),
        "versions": {name: version(name) for name in names},
        "limits": {figure: most for figure, (_, most) in PROBES.items()},
        "behaviour": found,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    if not all(row["passed"] for name, rows in found.items() if name.startswith("forebay") for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
