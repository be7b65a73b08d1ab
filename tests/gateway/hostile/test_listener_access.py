"""Clients without a key, or without manners, cost a gateway next to nothing and learn nothing."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest
from tests.gateway.rig import CHAT, Worker, chat, cluster, error_code, post
from tests.net.rig import peer, run

from forebay.core.model import Limits, TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.gateway.serve import PRIVATE_LIMITS
from forebay.registry.keys import change_keys

KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)
GOOD = b"authorization: Bearer " + KEY.encode()
HEAD = b"%b HTTP/1.1\r\nhost: a\r\n%b\r\ncontent-length: 5000000\r\n\r\n"


def door(folder: Path, **limits: int) -> TenancySpec:
    change_keys(folder / "keys.json", lambda _: ((RECORD,), None))
    team = Tenant("team", ("chat", "cheap"), limits=Quota(**limits))
    return TenancySpec((team,), str(folder / "keys.json"), str(folder / "counts.json"), str(folder / "leases.json"))


@pytest.mark.parametrize(
    ("start", "field", "status", "code"),
    [
        (b"POST " + CHAT, b"x: y", 401, "invalid_api_key"),
        (b"POST " + CHAT, GOOD[:-1] + b"?", 401, "invalid_api_key"),
        (b"POST " + CHAT, b"expect: 100-continue", 401, "invalid_api_key"),
        (b"POST /nowhere", GOOD, 404, "not_found"),
        (b"PUT " + CHAT, GOOD, 405, "method_not_allowed"),
    ],
)
def test_the_body_of_a_request_that_will_be_rejected_is_not_read(
    tmp_path: Path, start: bytes, field: bytes, status: int, code: str
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), tenancy=door(tmp_path)) as front, peer(front.port) as client:
            client.send(HEAD % (start, field) + b'{"model":')
            answer = await client.answer()
            assert (answer.status, error_code(answer)) == (status, code)
            assert answer.headers[b"connection"] == b"close"
            assert (b"www-authenticate" in answer.headers) is (status == 401)

    run(main())


def test_body_of_an_authenticated_request_is_read_in_any_number_of_parts(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), tenancy=door(tmp_path)) as front, peer(front.port) as client:
            for _ in range(2):
                body = chat()
                client.send(post(body, CHAT, GOOD, b"expect: 100-continue").removesuffix(body))
                assert (await client.answer()).status == 100
                client.send(body[:9])
                client.send(body[9:])
                assert (await client.answer()).status == 200

    run(main())


def test_only_the_private_port_names_tenants(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), tenancy=door(tmp_path, requests_per_min=1)) as front:
            for status in (200, 429):
                assert (await front.ask(post(chat(), CHAT, GOOD))).status == status
            public = (await front.get(b"/metrics")).body
            assert b"forebay_requests_total" in public
            assert b"tenant" not in public
            private = msgspec.json.decode((tmp_path / "peers" / "gateway-0.json").read_bytes())["port"]
            async with peer(private) as scraper:
                scraper.send(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
                assert b'tenant="team"' in (await scraper.answer()).body

    run(main())


def test_idle_connections_do_not_block_the_private_port(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front, contextlib.AsyncExitStack() as stack, asyncio.timeout(10):
            private = msgspec.json.decode((tmp_path / "peers" / "gateway-0.json").read_bytes())["port"]
            for _ in range(PRIVATE_LIMITS.connections_max):
                await stack.enter_async_context(peer(private))
            status = 0
            while status != 200:  # for a moment all of them are newcomers too
                async with peer(private) as control:
                    control.send(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
                    status = (await control.answer()).status
                assert status in {200, 503}
            assert front.port != private

    run(main())


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://a/livez", 200),
        (b"HTTP://a:8080/v1/models?x=y", 200),
        (b"http://a", 404),
        (b"http://a?x=y", 404),
        (b"ftp://a/livez", 404),
        (b"*", 404),
    ],
)
def test_absolute_form_request_target_is_accepted(tmp_path: Path, target: bytes, status: int) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            assert (await front.get(target)).status == status
            inference = await front.ask(post(chat(), b"http://a" + CHAT + b"?beta=true"))
            assert inference.status == 200

    run(main())


@pytest.mark.parametrize(
    ("origins", "status"),
    [((), 400), (("https://app.example",), 400), (("https://evil.example",), 200), (("*",), 200)],
)
def test_only_listed_origins_may_use_a_gateway_without_keys(
    tmp_path: Path, origins: tuple[str, ...], status: int
) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker, cors_origins=origins) as front:
            simple = b"origin: https://evil.example", b"content-type: text/plain"  # no preflight for these
            answer = await front.ask(post(chat(), CHAT, *simple))
            assert answer.status == status
            assert len(worker.requests) == (status == 200)
            if status == 400:
                assert error_code(answer) == "invalid_request"
                assert b"gateway.cors_origins" in answer.body
            assert (await front.ask(post(chat(), CHAT, b"origin: http://localhost:3000"))).status == 200
            assert (await front.ask(post(chat()))).status == 200

    run(main())


def test_origin_is_not_checked_when_keys_are_required(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), tenancy=door(tmp_path)) as front:
            assert (await front.ask(post(chat(), CHAT, GOOD, b"origin: https://app.example"))).status == 200

    run(main())


def test_listener_rejections_carry_cors_headers_for_allowed_origins(tmp_path: Path) -> None:
    async def main() -> None:
        limits, origins = Limits(body_bytes_max=2000), ("https://app.example",)
        async with cluster(tmp_path, Worker(), cors_origins=origins, limits=limits) as front:
            for origin, allowed in (
                (b"https://app.example", b"https://app.example"),
                (b"https://other.example", None),
            ):
                answer = await front.ask(post(bytes(3000), CHAT, b"origin: " + origin))
                assert answer.status == 413
                assert answer.headers.get(b"access-control-allow-origin") == allowed
                assert answer.headers[b"vary"] == b"origin"

    run(main())
