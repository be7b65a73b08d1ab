"""Who may read metrics, and the names in `/readyz`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import Front, Worker, cluster, error_code, fronting, routes
from tests.net.rig import Answer, run

from forebay.core.model import TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Tenant, mint
from forebay.gateway.pages import is_local
from forebay.registry.keys import change_keys

ALL_KEY, ALL = mint("ops", bytes(ENTROPY_BYTES), now=0.0)
ONE_KEY, ONE = mint("team", b"1" * ENTROPY_BYTES, now=0.0)
PROXY = b"x-forwarded-for: 203.0.113.7\r\n"
"""Tests connect over loopback: this makes them a client elsewhere."""


def keyed(folder: Path) -> TenancySpec:
    change_keys(folder / "keys.json", lambda _: ((ALL, ONE), None))
    tenants = Tenant("ops"), Tenant("team", ("chat",))
    return TenancySpec(tenants, str(folder / "keys.json"), str(folder / "counts.json"), str(folder / "leases.json"))


async def get(front: Front, path: bytes, key: str = "", more: bytes = b"") -> Answer:
    auth = b"authorization: Bearer %b\r\n" % key.encode() if key else b""
    return await front.ask(b"GET %b HTTP/1.1\r\nhost: a\r\n%b%b\r\n" % (path, auth, more))


def test_metrics_require_loopback_or_an_unrestricted_key_when_keys_are_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), tenancy=keyed(tmp_path)) as front:
            assert b"chat-0" in (await get(front, b"/metrics")).body
            denied = await get(front, b"/metrics", more=PROXY)
            assert (denied.status, error_code(denied)) == (401, "invalid_api_key")
            assert denied.headers[b"www-authenticate"] == b"Bearer"
            assert b"chat" not in denied.body
            assert (await get(front, b"/metrics", ALL_KEY[:-1] + "?", PROXY)).status == 401
            restricted = await get(front, b"/metrics", ONE_KEY, PROXY)
            assert (restricted.status, error_code(restricted)) == (403, "model_not_allowed")
            allowed = await get(front, b"/metrics", ALL_KEY, PROXY)
            assert allowed.status == 200
            assert b"chat-0" in allowed.body

    run(main())


@pytest.mark.parametrize(
    ("metrics", "keys", "status"),
    [("local", True, 403), ("local", False, 403), ("open", True, 200), ("open", False, 200), ("keys", False, 200)],
)
def test_metrics_setting_admits_everyone_or_only_loopback(
    tmp_path: Path, metrics: str, keys: bool, status: int
) -> None:
    async def main() -> None:
        more: dict[str, Any] = {"tenancy": keyed(tmp_path)} if keys else {}
        async with cluster(tmp_path, Worker(), metrics=metrics, **more) as front:
            assert (await get(front, b"/metrics")).status == 200
            assert (await get(front, b"/metrics", ALL_KEY, b"forwarded: for=203.0.113.7\r\n")).status == status

    run(main())


def test_readiness_names_models_only_to_those_who_may_read_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path, routes(), tenancy=keyed(tmp_path)) as front:
            callers = ("", b"", True), ("", PROXY, False), (ONE_KEY, PROXY, False), (ALL_KEY, PROXY, True)
            for key, more, named in callers:
                answer = await get(front, b"/readyz", key, more)
                assert answer.status == 503
                missing = [{"model": "chat", "reason": "no replica"}]
                expected = {"status": "not ready", "missing": missing} if named else {"status": "not ready"}
                assert msgspec.json.decode(answer.body) == expected

    run(main())


@pytest.mark.interpreted  # with a stand-in for the exchange
@pytest.mark.parametrize(
    ("peer", "header", "local"),
    [
        ("127.0.0.1", b"", True),
        ("127.8.9.1", b"", True),
        ("::1", b"", True),
        ("::ffff:127.0.0.1", b"", True),
        ("::ffff:10.0.0.1", b"", False),
        ("10.0.0.1", b"", False),
        ("", b"", False),
        ("127.0.0.1", b"via", False),
    ],
)
def test_proxied_loopback_connections_are_not_local(peer: str, header: bytes, local: bool) -> None:
    exchange: Any = SimpleNamespace(peer=peer, header={header: b"x"}.get)
    assert is_local(exchange) is local
