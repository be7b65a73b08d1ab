"""Where a request came from, behind proxies too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import CHAT, Worker, chat, cluster, post
from tests.net.rig import run

from forebay.core.model import RecordsSpec
from forebay.gateway.asking import HOPS_MAX, Clients

INSIDE = ("10.0.0.0/8", "127.0.0.1", "fd00::/8")


@pytest.mark.interpreted  # with a stand-in for the exchange
@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        ("203.0.113.7", b"198.51.100.1", "203.0.113.7"),  # no proxy of ours: it may write anything
        ("10.0.0.1", b"", "10.0.0.1"),
        ("10.0.0.1", b"198.51.100.1", "198.51.100.1"),
        ("::ffff:10.0.0.1", b"198.51.100.1", "198.51.100.1"),
        ("fd00::1", b"2001:db8::5", "2001:db8::5"),
        ("10.0.0.1", b"6.6.6.6, 198.51.100.1", "198.51.100.1"),  # what the client sent itself comes first
        ("10.0.0.1", b"6.6.6.6, 198.51.100.1,10.9.9.9 , 127.0.0.1", "198.51.100.1"),
        ("10.0.0.1", b"10.1.1.1, 10.2.2.2", "10.1.1.1"),
        ("10.0.0.1", b"198.51.100.1:4711", "198.51.100.1"),
        ("10.0.0.1", b"[2001:db8::5]:443", "2001:db8::5"),
        ("10.0.0.1", b"::ffff:198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", b"198.51.100.1, unknown, 10.2.2.2", "10.2.2.2"),
        ("10.0.0.1", b"<script>\xff", "10.0.0.1"),
        ("10.0.0.1", b"198.51.100.1" + b", 10.0.0.2" * (HOPS_MAX + 1), "10.0.0.2"),
        ("", b"198.51.100.1", ""),
    ],
)
def test_client_address_is_the_last_untrusted_one_of_the_forwarded_chain(
    peer: str, header: bytes, client: str
) -> None:
    exchange: Any = SimpleNamespace(peer=peer, headers=(), header={b"x-forwarded-for": header}.get)
    assert Clients(INSIDE).of(exchange) == client
    assert Clients(()).of(exchange) == peer


def test_audit_log_names_the_client_instead_of_the_proxy(tmp_path: Path) -> None:
    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(), records=records, trusted_proxies=("127.0.0.0/8",)) as front:
            two_lines = b"198.51.100.3\r\nX-Forwarded-For: 127.0.0.9"
            targets = (CHAT, b"198.51.100.1"), (b"/nowhere", b"198.51.100.2"), (CHAT, two_lines), (CHAT, b"bad\0")
            for target, field in targets:
                await front.ask(post(chat(), target, b"x-forwarded-for: " + field))
            front.signals.put_nowait(15)
            await front.done

    run(main())
    [log] = (tmp_path / "records").rglob("audit-*.jsonl")
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    found = [(line["status"], line["client"]) for line in lines if line["event"] == "request"]
    assert found == [(200, "198.51.100.1"), (404, "198.51.100.2"), (200, "198.51.100.3"), (400, "127.0.0.1")]
