"""Request records through the admin API: invalid parameters are named, and every read is bounded."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.cli.records.test_records import decided, keep
from tests.control.api.rig import IdleControl, services

from forebay.cli.records.reading import RecordFiles
from forebay.control.api.app import make_app
from forebay.control.api.operations import records
from forebay.control.api.services import Services
from forebay.core.errors import Code, Refusal

WHERE = (
    ("GET", "/v1/decisions?request_id=req-1"),
    ("GET", "/v1/usage"),
    ("POST", "/v1/audit/verify"),
    ("POST", "/v1/audit/tail"),
)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Services]:
    rig, root = IdleControl(tmp_path), tmp_path / "records"
    keep(root, "gateway-0", decided("req-1"), decided("req-2", tenant=""))
    yield replace(services(rig, tmp_path), records=RecordFiles(root))
    rig.journal.close()


def run(parts: Services, test: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def bounded() -> None:
        transport = httpx.ASGITransport(make_app(parts))
        async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            await test(client)

    asyncio.run(bounded())


def problem(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize(
    ("method", "where", "body", "param"),
    [
        ("GET", "/v1/decisions", b"", "request_id"),
        ("GET", f"/v1/decisions?request_id={'x' * 300}", b"", "request_id"),
        ("GET", "/v1/usage?since=7d", b"", "since"),
        ("GET", "/v1/usage?since=2026-02-30", b"", "since"),
        ("GET", "/v1/usage?since=2026-W01-1", b"", "since"),
        ("GET", "/v1/usage?model=%00", b"", "model"),
        ("POST", "/v1/audit/tail", b'{"last": 0}', "last"),
        ("POST", "/v1/audit/tail", b'{"last": 1001}', "last"),
        ("POST", "/v1/audit/verify", b'{"archived": 1}', "archived"),
        ("POST", "/v1/audit/verify", b'{"folder": "/"}', "folder"),
    ],
)
def test_invalid_parameter_is_named(parts: Services, method: str, where: str, body: bytes, param: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert problem(await client.request(method, where, content=body)) == (400, "invalid_request", param)

    run(parts, test)


def test_empty_tenant_selects_usage_without_tenant(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for query, requests in (("", [1, 1]), ("?tenant=", [1]), ("?tenant=acme", [1]), ("?since=2999-01-01", [])):
            rows = (await client.get(f"/v1/usage{query}")).json()["rows"]
            assert [row["requests"] for row in rows] == requests, query

    run(parts, test)


def test_usage_with_too_many_rows_is_rejected(parts: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "USAGE_ROWS_MAX", 1)

    async def test(client: httpx.AsyncClient) -> None:
        assert problem(await client.get("/v1/usage")) == (400, "invalid_request", "since")
        assert (await client.get("/v1/usage?tenant=acme")).status_code == 200

    run(parts, test)


def test_reading_records_stops_at_the_time_limit_and_at_shutdown(
    parts: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(stage: str, done: int, total: int | None) -> None:
        raise Refusal(Code.DRAINING, "the cluster stops.")

    async def ends(client: httpx.AsyncClient) -> None:
        for method, where in WHERE:
            assert problem(await client.request(method, where))[:2] == (503, "draining")

    async def long(client: httpx.AsyncClient) -> None:
        for method, where in WHERE:
            answer = await client.request(method, where)
            assert problem(answer)[:2] == (409, "conflict")
            assert "read them where the gateways run" in answer.text

    run(replace(parts, catalogue=replace(parts.catalogue, progress=stops)), ends)
    monkeypatch.setattr(records, "READ_S_MAX", -1.0)
    run(parts, long)


def test_unreadable_record_files_are_reported(parts: Services, tmp_path: Path) -> None:
    for name in ("decisions-00000002.log", "usage-2026-01-01.json", "audit-00000002.jsonl"):
        (tmp_path / "records/gateway-0" / name).mkdir()

    async def test(client: httpx.AsyncClient) -> None:
        for method, where in WHERE:
            answer = await client.request(method, where)
            assert problem(answer)[:2] == (500, "internal_error")
            assert "Is a directory" in answer.text

    run(parts, test)


def test_records_disabled_is_a_conflict(parts: Services) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for method, where in WHERE:
            assert problem(await client.request(method, where))[:2] == (409, "conflict")

    run(replace(parts, records=None), test)
