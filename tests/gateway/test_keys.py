"""A gateway that asks for keys: who gets in, what is counted, and that every reservation comes back."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import (
    EVENT_STREAM,
    JSON,
    RETRYABLE,
    ROUTES,
    USAGE,
    Front,
    Worker,
    chat,
    cluster,
    error_code,
    failing,
    fronting,
    post,
    routes,
    whole,
    working,
)
from tests.net.rig import Answer, peer, run, until

from forebay.core.admission import Band
from forebay.core.model import RecordsSpec, Snapshot, Task, TenancySpec
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.net.server import Exchange, Handler
from forebay.registry.keys import change_keys

CHAT = b"/v1/chat/completions"
TEAM = Tenant("team", ("chat",), band_max=Band.INTERACTIVE, limits=Quota(requests_per_min=6, streams_max=2))
KEY, RECORD = mint("team", bytes(ENTROPY_BYTES), now=0.0)
BEARER = b"authorization: Bearer " + KEY.encode()
BIG = replace(ROUTES, name="big")


def spec(folder: Path) -> TenancySpec:
    """One tenant with one key."""
    change_keys(folder / "keys.json", lambda _: ((RECORD,), None))
    return TenancySpec((TEAM,), str(folder / "keys.json"), str(folder / "counts.json"), str(folder / "leases.json"))


async def ready(front: Front) -> None:
    """Until the gateway has heard of its replicas."""
    await front.ready()


@pytest.mark.parametrize(
    ("fields", "model", "status", "code"),
    [
        ((), "chat", 401, "invalid_api_key"),
        ((b"authorization: Bearer fb-aaaaaaaa-bbbb",), "chat", 401, "invalid_api_key"),
        ((b"authorization: Bearer fb-aaaaaaaa-bbbb",), "no-such-model", 401, "invalid_api_key"),
        ((BEARER,), "big", 403, "model_not_allowed"),
        ((BEARER,), "chat", 200, ""),
        ((b"x-api-key: " + KEY.encode(),), "chat", 200, ""),
        ((b"authorization: Basic dTpw", b"x-api-key: " + KEY.encode()), "chat", 200, ""),
        ((b"authorization: Basic dTpw",), "chat", 401, "invalid_api_key"),
    ],
)
def test_only_keys_that_may_use_the_model_are_admitted(
    tmp_path: Path, fields: tuple[bytes, ...], model: str, status: int, code: str
) -> None:
    async def main() -> None:
        worker, big = Worker(whole), Worker(whole, "big-0", "big")
        async with (
            working(worker, big),
            fronting(tmp_path, routes(worker), routes(big, base=BIG), tenancy=spec(tmp_path)) as front,
        ):
            await ready(front)
            answer = await front.ask(post(chat(model), CHAT, *fields))
            assert answer.status == status
            if code:
                assert error_code(answer) == code
                assert KEY.encode() not in answer.body
                assert not worker.requests
                assert not big.requests
            assert (b"www-authenticate" in answer.headers) == (status == 401)

    run(main())


def test_models_are_listed_for_tenants_that_may_use_them(tmp_path: Path) -> None:
    async def main() -> None:
        worker, big = Worker(whole), Worker(whole, "big-0", "big")
        async with (
            working(worker, big),
            fronting(tmp_path, routes(worker), routes(big, base=BIG), tenancy=spec(tmp_path)) as front,
        ):
            await ready(front)
            assert (await front.get(b"/v1/models")).status == 401
            get = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + BEARER + b"\r\n\r\n"
            listed = msgspec.json.decode((await front.ask(get)).body)
            assert [model["id"] for model in listed["data"]] == ["chat"]

    run(main())


def dying(exchange: Exchange) -> None:
    """Close the connection unanswered."""
    exchange.abort()


def limits_told(answer: Answer) -> tuple[int, int, int]:
    """The limit of requests, how many are left, and in how many seconds all are there again."""
    limit, left, reset = (
        answer.headers[b"x-ratelimit-%b-requests" % what] for what in (b"limit", b"remaining", b"reset")
    )
    assert reset.endswith(b"s")
    return int(limit), int(left), int(reset[:-1])


@pytest.mark.parametrize(
    "answer", [whole, dying, failing(400, "invalid_request"), failing(503, "overloaded", RETRYABLE)]
)
def test_request_limit_applies_however_requests_end(tmp_path: Path, answer: Handler) -> None:
    async def main() -> None:
        worker = Worker(answer)
        async with working(worker), fronting(tmp_path, routes(worker), tenancy=spec(tmp_path)) as front:
            await ready(front)
            answers = [await front.ask(post(chat(), CHAT, BEARER)) for _ in range(6)]
            assert 429 not in [answer.status for answer in answers]
            assert [limits_told(answer)[:2] for answer in answers] == [(6, left) for left in (5, 4, 3, 2, 1, 0)]
            over = await front.ask(post(chat(), CHAT, BEARER))
            assert (over.status, error_code(over)) == (429, "rate_limit_exceeded")
            assert 1 <= int(over.headers[b"retry-after"]) <= 61
            limit, left, reset_s = limits_told(over)
            assert (limit, left) == (6, 0)
            assert 55 <= reset_s <= 61  # the newest request leaves the window last
            assert not any(name.endswith(b"-tokens") for name in over.headers if name.startswith(b"x-ratelimit"))

    run(main())


def test_changed_tenants_and_limits_do_not_end_running_streams(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        worker = Worker(held.append)
        request = post(chat(stream=True), CHAT, BEARER)
        async with cluster(tmp_path, worker, tenancy=spec(tmp_path)) as front, peer(front.port) as client:
            client.send(request)
            await until(lambda: len(held) == 1)
            held[0].start(200, [EVENT_STREAM])
            held[0].write(b'data: {"n":1}\n\n')
            tenants = (Tenant("other"),)
            snapshot = Snapshot(2, (routes(worker),), tenants=tenants)
            Path(front.spec.snapshot_path).write_bytes(msgspec.json.encode(snapshot))
            async with asyncio.timeout(10):
                while (await front.ask(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % BEARER)).status != 401:
                    await asyncio.sleep(0.01)
            held[0].write(b"data: [DONE]\n\n")
            held[0].end([USAGE])
            answer = await client.answer()
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_streams_are_limited_and_free_again_when_they_end_or_are_left(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        worker = Worker(held.append)
        request = post(chat(stream=True), CHAT, BEARER)
        async with working(worker), fronting(tmp_path, routes(worker), tenancy=spec(tmp_path)) as front:
            await ready(front)
            async with peer(front.port) as one, peer(front.port) as two:
                one.send(request)
                two.send(request)
                await until(lambda: len(held) == 2)
                third = await front.ask(request)
                assert (third.status, error_code(third)) == (429, "streams_limit")
            await until(lambda: all(exchange.finished for exchange in held))
            async with asyncio.TaskGroup() as group:
                again = group.create_task(front.ask(request))
                await until(lambda: len(held) == 3)
                whole(held[2])
            assert again.result().status == 200

    run(main())


@pytest.mark.parametrize("limit", [{"max_tokens": 400}, {"max_tokens": 100, "n": 4}])
def test_concurrent_long_answers_stay_within_the_token_limit(tmp_path: Path, limit: dict[str, int]) -> None:
    def long(exchange: Exchange) -> None:
        exchange.respond(200, [JSON, (b"x-forebay-usage", b"20,400,0")], b'{"object":"chat.completion"}')

    async def main() -> None:
        worker = Worker(whole)
        worker.report = replace(worker.report, capacity=64)
        tenant = replace(TEAM, limits=Quota(tokens_per_min=2000, tokens_per_day=50_000))
        async with (
            working(worker),
            fronting(tmp_path, routes(worker), tenancy=replace(spec(tmp_path), tenants=(tenant,))) as front,
        ):
            await ready(front)
            for _ in range(20):  # answers have been short so far
                await front.ask(post(chat(max_tokens=1), CHAT, BEARER))
            worker.answer = long
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(front.ask(post(chat(**limit), CHAT, BEARER))) for _ in range(40)]
            statuses = [task.result().status for task in asked]
            assert set(statuses) == {200, 429}
            assert 200 + 420 * statuses.count(200) <= 2000
            over = await front.ask(post(chat(max_tokens=2500), CHAT, BEARER))
            assert (over.status, error_code(over)) == (429, "rate_limit_exceeded")
            assert b"`max_tokens`" in over.body

    run(main())


@pytest.mark.parametrize(
    ("task", "path", "prompt", "sent"),
    [
        (Task.EMBED, b"/v1/embeddings", {"input": "hi"}, 6),
        (Task.CHAT, b"/v1/completions", {"prompt": "hi"}, 6),  # 16 tokens each, unless they say more
        (Task.CHAT, b"/v1/completions", {"prompt": ["hi"] * 10}, 1),
        (Task.CHAT, CHAT, {"messages": []}, 1),
    ],
)
def test_no_more_tokens_are_reserved_than_a_request_can_use(
    tmp_path: Path, task: Task, path: bytes, prompt: dict[str, Any], sent: int
) -> None:
    held: list[Exchange] = []
    body = msgspec.json.encode({"model": "chat", **prompt})

    async def main() -> None:
        worker, tenancy = Worker(held.append), spec(tmp_path)
        limited = replace(tenancy, tenants=(replace(TEAM, limits=Quota(tokens_per_min=300)),))
        async with (
            working(worker),
            fronting(tmp_path, routes(worker, base=replace(ROUTES, task=task)), tenancy=limited) as front,
            asyncio.TaskGroup() as group,
        ):
            await ready(front)
            asked = [group.create_task(front.ask(post(body, path, BEARER))) for _ in range(6)]
            await until(lambda: len(held) == sent and sum(task.done() for task in asked) == 6 - sent)
            for exchange in held:
                whole(exchange)

    run(main())


def test_audit_log_names_the_tenant_but_not_the_key(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(whole)
        records = RecordsSpec(str(tmp_path / "records"))
        async with (
            working(worker),
            fronting(tmp_path, routes(worker), tenancy=spec(tmp_path), records=records) as front,
        ):
            await ready(front)
            await front.ask(post(chat(), CHAT, BEARER))
            assert (await front.ask(post(chat(), CHAT, b"authorization: Bearer " + b"x" * 40))).status == 401

    run(main())
    written = b"".join(file.read_bytes() for file in (tmp_path / "records").rglob("*") if file.is_file())
    assert b'"team"' in written
    assert KEY.encode() not in written
    assert KEY.rpartition("-")[2].encode() not in written
