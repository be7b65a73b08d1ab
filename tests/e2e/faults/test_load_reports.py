"""Load reports that are false or malformed: they may shift traffic, but clients see no error."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.faults.conftest import Texts
from tests.e2e.faults.front import fronting
from tests.e2e.faults.grounds import GATEWAYS, SIZES, everybody_serves, wait_quiet
from tests.e2e.faults.load import CLIENTS, loading
from tests.e2e.faults.proxy import Lie

from forebay.core.model import Policy

LIES = 8
"""So many polls are answered with each lie: two gateways poll four times a second."""
FIGURES = ("in_flight", "running", "waiting", "capacity", "kv_used_tokens", "kv_total_tokens")


def answered(body: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer with this body."""
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def saying(**more: Any) -> Lie:
    """The truth but for this."""
    return lambda body: answered(msgspec.json.encode({**msgspec.json.decode(body), **more}))


def digits(text: bytes) -> Lie:
    """All figures are this one, which need not be one that fits into a machine word."""

    def lie(body: bytes) -> bytes:
        told = {**msgspec.json.decode(body), **dict.fromkeys(FIGURES, msgspec.Raw(text))}
        return answered(msgspec.json.encode(told))

    return lie


def stale() -> Lie:
    """Always the first report."""
    first: list[bytes] = []

    def lie(body: bytes) -> bytes:
        first.append(body)
        return answered(first[0])

    return lie


HARMLESS: dict[str, Callable[[], Lie]] = {
    "idle": lambda: saying(in_flight=0, running=0, waiting=0, kv_used_tokens=0),
    "stale": stale,
    "negative": lambda: digits(b"-7"),
    "huge": lambda: digits(b"1" + b"0" * 30),
    "huge beyond any float": lambda: digits(b"1" + b"0" * 400),
    "room without end": lambda: saying(capacity=10**9),
    "stalled for ever": lambda: saying(stalled_s=10**9),
}
"""Who says this still serves, if not necessarily much."""
FATAL: dict[str, Callable[[], Lie]] = {
    "of another model": lambda: saying(model="other"),
    "of another replica": lambda: saying(replica="other-0"),
    "of an older start": lambda: saying(generation=0),
    "in no known state": lambda: saying(state="splendid"),
    "of a replica that drains": lambda: saying(state="draining"),
    "words for figures": lambda: saying(in_flight="few", capacity="much"),
    "not JSON": lambda: lambda _: answered(b"\xff\xfe in flight: 3"),
    "nested without end": lambda: lambda _: answered(b"[" * 100_000),
    "an error": lambda: lambda _: answered(b"{}", b"500 Hm"),
    "no HTTP": lambda: lambda _: b"\x00\x01\x02\r\n\r\n",
    "silence": lambda: lambda _: None,
}
"""Who says this gets nothing more, although it would answer."""


@pytest.mark.parametrize(("model", "lies"), [("duo", HARMLESS | FATAL), ("quad", HARMLESS)])
def test_false_load_reports_cause_no_client_errors(
    cluster: Cluster, texts: Texts, tmp_path: Path, model: str, lies: dict[str, Callable[[], Lie]]
) -> None:
    async def main() -> None:
        async with fronting(cluster, model, tmp_path, Policy.CPR) as front:
            began: dict[int, str] = {}
            async with loading(front.port, model, texts[model]) as load:
                for name, lie in lies.items():
                    began[len(load.seen)] = name
                    proxy = await front.renew(0)
                    proxy.lie = lie()
                    enough = GATEWAYS if name == "silence" else LIES
                    await load.until(f"{name} was told", lambda p=proxy, n=enough: p.lies >= n)  # type: ignore[misc]
                    if name in FATAL:
                        assert proxy.asked == 0, name
                    proxy.lie = None
                await load.more(CLIENTS)
            assert [(began[max(n for n in began if n <= each.asked_at)], each) for each in load.bad()] == []
            await everybody_serves(front.port, model, texts[model], SIZES[model], GATEWAYS)
            await asyncio.to_thread(wait_quiet, front.peers, front.urls)

    asyncio.run(main())


def test_replica_with_failing_load_reports_loses_traffic_but_no_stream(
    cluster: Cluster, texts: Texts, tmp_path: Path
) -> None:
    async def main() -> None:
        async with fronting(cluster, "duo", tmp_path, Policy.ROUND_ROBIN) as front:
            first, _ = front.proxies
            async with loading(front.port, "duo", texts["duo"]) as load:
                await load.until("it serves", lambda: first.asked >= CLIENTS)
                first.lie = lambda _: answered(b"", b"503 Down")
                victim = front.routes.replicas[0].id
                await load.until("traffic goes elsewhere", lambda: victim not in load.shares(CLIENTS))
            assert load.bad() == []
            first.lie = None
            await everybody_serves(front.port, "duo", texts["duo"], SIZES["duo"], GATEWAYS)
            await asyncio.to_thread(wait_quiet, front.peers, front.urls)

    asyncio.run(main())
