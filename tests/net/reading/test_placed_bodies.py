"""The HTTP server: large bodies are read into memory of the handler's choice, whole and in order."""

import asyncio
import random
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.net.certificates import CA, issue, write
from tests.net.rig import HANG_S, PATIENCE_S, get, peer, post, run, serving, until

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.reading.refusing import SMALL_BODY_BYTES
from forebay.net.server import Exchange
from forebay.net.tls import load

SIZE = 700_001
BODY = random.Random(0).randbytes(SIZE)
HEAD = post(BODY)[:-SIZE]


class Places:
    """Gives memory for bodies, and answers with the size of what arrived there or elsewhere."""

    def __init__(self, most: int = 10) -> None:
        self.given: list[memoryview] = []
        self.seen: list[bytes] = []
        self._most = most

    def __call__(self, exchange: Exchange, size: int) -> memoryview | None:
        if len(self.given) == self._most:
            return None
        self.given.append(memoryview(bytearray(size)))
        return self.given[-1]

    def handle(self, exchange: Exchange) -> None:
        if exchange.placed is not None:
            assert exchange.body == b""
            assert exchange.placed is self.given[-1]
        self.seen.append(exchange.body if exchange.placed is None else bytes(exchange.placed))
        exchange.respond(200, [], b"%d" % len(self.seen[-1]))


@pytest.mark.parametrize("at", [1, len(HEAD) - 1, len(HEAD), len(HEAD) + 1, 65_000, 300_000, SIZE])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_large_body_is_read_into_the_memory_given_for_it(at: int, loop: str) -> None:
    places, data = Places(), HEAD + BODY

    async def main() -> None:
        async with serving(places.handle, place=places) as server, peer(server.port) as client:
            for _ in range(2):
                client.send(data[:at])
                await client.writer.drain()
                await asyncio.sleep(0)
                client.send(data[at:])
                assert (await client.answer()).body == b"%d" % SIZE
            assert server.common.bodies_bytes == 0

    (run if loop == "uvloop" else _run_on_asyncio)(main())
    assert places.seen == [BODY, BODY]
    assert len(places.given) == 2


def _run_on_asyncio(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, HANG_S))


def test_large_body_is_read_over_tls(tmp_path: Path) -> None:
    places, context = Places(), ssl.create_default_context()
    CA.configure_trust(context)

    async def main() -> None:
        async with serving(places.handle, place=places) as server:
            secure = load(write(tmp_path, issue())).context
            server.close()
            await server.start("127.0.0.1", 0, tls=secure)
            reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
            for _ in range(2):
                writer.write(HEAD + BODY)
                async with asyncio.timeout(PATIENCE_S):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                    assert await reader.readexactly(6) == b"%d" % SIZE
            writer.close()

    run(main())
    assert places.seen == [BODY, BODY]
    assert len(places.given) == 2


def test_requests_around_a_placed_body_are_read_as_ever() -> None:
    places, chunked = Places(most=1), b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    requests = [get(b"/first"), HEAD + BODY, get(b"/second"), post(b"small"), HEAD + BODY, post(b"last")]
    expected = [b"", BODY, b"", b"small", BODY, b"last", BODY]

    async def main() -> None:
        async with serving(places.handle, place=places) as server, peer(server.port) as client:
            client.send(b"".join(requests))
            client.send(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, BODY))
            for each in expected:
                assert (await client.answer()).body == b"%d" % len(each)

    run(main())
    assert places.seen == expected
    assert len(places.given) == 1


def test_memory_is_asked_for_once_the_body_is_expected() -> None:
    places = Places()

    async def main() -> None:
        async with serving(places.handle, place=places) as server, peer(server.port) as client:
            client.send(HEAD[:-2] + b"expect: 100-continue\r\n\r\n")
            assert (await client.answer()).status == 100
            client.send(BODY)
            assert (await client.answer()).status == 200

    run(main())
    assert places.seen == [BODY]


def test_body_that_is_rejected_is_given_no_memory() -> None:
    places, limits = Places(), Limits(body_bytes_max=SIZE - 1)

    async def main() -> None:
        async with serving(places.handle, limits, place=places) as server, peer(server.port) as client:
            client.send(HEAD + BODY[:300_000])
            assert (await client.answer()).status == 413
        async with (
            serving(places.handle, wants_body=lambda _: False, place=places) as server,
            peer(server.port) as client,
        ):
            client.send(HEAD + BODY[:300_000])
            assert (await client.answer()).headers[b"connection"] == b"close"

    run(main())
    assert places.given == []
    assert places.seen == [b""]


@pytest.mark.parametrize("there", [SMALL_BODY_BYTES, 300_000])
def test_client_that_leaves_within_a_placed_body_frees_its_memory(there: int) -> None:
    places = Places()

    async def main() -> None:
        async with serving(places.handle, place=places) as server:
            async with peer(server.port) as client:
                client.send(HEAD + BODY[:there])
                await until(lambda: bool(places.given) and places.given[0][there - 1] == BODY[there - 1])
                assert server.common.bodies_bytes == SIZE
            await until(lambda: server.connections == 0)
            assert server.common.bodies_bytes == 0

    run(main())
    assert places.seen == []


def test_placed_body_that_does_not_arrive_in_time_is_a_408() -> None:
    places, refused = Places(), list[Code]()
    limits = Limits(body_timeout_s=0.2)

    async def main() -> None:
        async with serving(places.handle, limits, place=places, refused=refused.append) as server:
            async with peer(server.port) as client:
                client.send(HEAD + BODY[:300_000])
                assert (await client.answer()).status == 408
                client.send(BODY[300_000:])  # read and dropped, or the client might not get to read the response
                assert await client.rest() == b""
            assert server.common.bodies_bytes == 0

    run(main())
    assert (places.seen, refused) == ([], [Code.REQUEST_TIMEOUT])


def test_placed_body_waits_for_the_response_of_an_earlier_request() -> None:
    places, waiting = Places(), list[Exchange]()

    def handle(exchange: Exchange) -> None:
        if exchange.target == b"/first":
            waiting.append(exchange)
        else:
            places.handle(exchange)

    async def main() -> None:
        async with serving(handle, place=places) as server, peer(server.port) as client:
            client.send(get(b"/first") + HEAD + BODY)
            await until(lambda: bool(waiting))
            assert places.given == []
            waiting.pop().respond(200, [], b"first")
            assert (await client.answer()).body == b"first"
            assert (await client.answer()).body == b"%d" % SIZE

    run(main())
    assert places.seen == [BODY]


def test_body_behind_an_upgrade_offer_is_read_to_its_end() -> None:
    places, offer = Places(), b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n"

    async def main() -> None:
        async with serving(places.handle, place=places) as server, peer(server.port) as client:
            for _ in range(2):
                client.send(HEAD[:-2] + offer + b"\r\n" + BODY)
                assert (await client.answer()).body == b"%d" % SIZE
            assert server.common.bodies_bytes == 0

    run(main())
    assert places.seen == [BODY, BODY]


def test_body_that_follows_an_upgrade_offer_without_one_is_read_to_its_end() -> None:
    places = Places()

    async def main() -> None:
        async with serving(places.handle, place=places) as server, peer(server.port) as client:
            client.send(get(b"/first") + get(b"/", b"connection: upgrade", b"upgrade: h2c") + HEAD + BODY + get())
            assert [(await client.answer()).body for _ in range(4)] == [b"0", b"0", b"%d" % SIZE, b"0"]

    run(main())
    assert places.seen == [b"", b"", BODY, b""]
