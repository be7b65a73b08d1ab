"""A replica sends a malformed or truncated response: clients get theirs from another replica."""

import asyncio
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.faults.conftest import Texts
from tests.e2e.faults.front import fronting
from tests.e2e.faults.grounds import GATEWAYS, SIZES, everybody_serves, wait_quiet
from tests.e2e.faults.load import loading
from tests.e2e.faults.proxy import Fault

from forebay.core.model import Policy

HITS = 4
"""So many answers are broken by each fault; after five in a row a breaker opens, so more would take long."""
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
FAULTS = {
    "reset at once": Fault(),
    "closed at once": Fault(end="close"),
    "bytes that are no HTTP": Fault(b"\x00\xff\x16\x03 what?\r\n\r\n", end="wait"),
    "a head that is cut": Fault(b"HTTP/1.1 200 OK\r\ncontent-ty", end="close"),
    "a head without end": Fault(b"HTTP/1.1 200 OK\r\n" + b"x-padding: more\r\n" * 20_000, end="wait"),
    "two lengths": Fault(JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", end="wait"),
    "a length that is no number": Fault(JSON + b"content-length: many\r\n\r\n{}", end="wait"),
    "a length that is too long": Fault(JSON + b'content-length: 500\r\n\r\n{"choices":', end="close"),
    "a length that is too short": Fault(JSON + b'content-length: 12\r\n\r\n{"choices":[{"index":0}]}', end="wait"),
    "a stream that is reset before its first event": Fault(STREAM + CHUNKED),
    "an empty stream": Fault(STREAM + CHUNKED + LAST_CHUNK, end="wait"),
    "an empty stream that ends with the connection": Fault(STREAM + b"connection: close\r\n\r\n", end="close"),
    "a stream without its end": Fault(LAST_CHUNK, after=9, end="wait"),
    "a stream that is reset": Fault(after=9),
    "a stream that is closed": Fault(after=9, end="close"),
    "a stream that is cut within an event": Fault(b'20\r\ndata: {"id":"chatc', after=9, end="close"),
    "a stream whose chunks are garbage": Fault(b"no size\r\n\x00\xff\r\n", after=9, end="wait"),
}


LATE = [name for name, fault in FAULTS.items() if fault.after]


@pytest.mark.parametrize(("model", "names"), [("duo", [*FAULTS]), ("quad", LATE)])
def test_malformed_responses_are_retried_without_client_errors(
    cluster: Cluster, texts: Texts, tmp_path: Path, model: str, names: list[str]
) -> None:
    async def main() -> None:
        async with fronting(cluster, model, tmp_path, Policy.ROUND_ROBIN) as front:
            faults: dict[int, str] = {}
            async with loading(front.port, model, texts[model]) as load:
                for name in names:
                    faults[len(load.seen)] = name
                    proxy = await front.renew(0)  # always the same: nobody should meet two faulty ones
                    proxy.fault = FAULTS[name]
                    await load.until(f"{name} has happened", lambda proxy=proxy: proxy.broken >= HITS)  # type: ignore[misc]
                    proxy.fault = None
            assert [(faults[max(n for n in faults if n <= each.asked_at)], each) for each in load.bad()] == []
            await everybody_serves(front.port, model, texts[model], SIZES[model], GATEWAYS)
            await asyncio.to_thread(wait_quiet, front.peers, front.urls)

    asyncio.run(main())
