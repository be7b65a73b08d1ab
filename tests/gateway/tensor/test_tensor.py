"""Requests for tensor models: what their replicas get, what clients get, and what is not done twice."""

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.rig import (
    JSON,
    RETRYABLE,
    ROUTES,
    Front,
    Worker,
    cluster,
    failing,
    fronting,
    post,
    routes,
    silent,
    working,
)
from tests.net.rig import Answer, lone, peer, run, until

from forebay.core.errors import Refusal
from forebay.core.model import Dispatch, ModelRoutes, Policy, ReplicaState, Snapshot, StandIn, Task
from forebay.gateway.tensor import requests as tensor
from forebay.net.server import Exchange

BINARY = (b"content-type", b"application/octet-stream")
BASE = replace(ROUTES, name="net", task=Task.TENSOR)
INFER = b"/v2/models/net/infer"
FORM = b"content-type: multipart/form-data; boundary=xx"


def echo(exchange: Exchange) -> None:
    """Answer with the body, as tensors come: binary, with the length of the JSON before them."""
    exchange.respond(200, [BINARY, (b"inference-header-content-length", b"3")], exchange.body or b"nothing")


def net(answer: Any = echo, index: int = 0, model: str = "net") -> Worker:
    return Worker(answer, f"{model}-{index}", model)


def form(model: bytes, *, file: bytes = b"\x00\r\n--x\r\n\xff") -> bytes:
    parts = (
        b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + file,
        b'Content-Disposition: form-data; name="model"\r\n\r\n' + model,
        b'content-disposition: form-data; name="stream"\r\n\r\ntrue',
    )
    return b"".join(b"--xx\r\n" + part + b"\r\n" for part in parts) + b"--xx--\r\n"


def error(answer: Answer) -> str:
    return str(msgspec.json.decode(answer.body)["error"])


def sequence(id: int | str, *, start: bool = True) -> bytes:
    return msgspec.json.encode({"parameters": {"sequence_id": id, "sequence_start": start}, "inputs": []})


def test_tensor_bodies_are_relayed_verbatim_with_their_binary_headers(tmp_path: Path) -> None:
    async def main() -> None:
        worker, body = net(), b"{}\n" + bytes(range(256)) * 8192
        async with cluster(tmp_path, worker, base=BASE) as front:
            fields = (b"content-type: application/octet-stream", b"Inference-Header-Content-Length: 3")
            more = (b"accept-encoding: gzip", b"x-forebay-deadline-ms: 60000")
            got = await front.ask(post(body, b"/v2/models/net/versions/7/infer?x=1", *fields, *more))

            assert (got.status, got.body == body) == (200, True)
            assert got.headers[b"inference-header-content-length"] == b"3"
            assert got.headers[b"x-forebay-replica"] == b"net-0"
            sent = worker.requests[0]
            assert (sent.target, worker.bodies[0] == body) == (b"/v2/models/net/versions/7/infer", True)
            for name in (b"content-type", b"inference-header-content-length", b"accept-encoding"):
                assert sent.header(name) in (b"application/octet-stream", b"3", b"gzip")
            assert 0 < int(sent.header(b"x-forebay-deadline-ms") or b"") <= 60_000
            assert sent.header(b"x-forebay-gateway") == b"1"
            assert await front.metric('forebay_prompt_tokens_total{model="net"}') == 0, "what is binary is no text"

    run(main())


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (b"content-type: application/json", b'{"documents": [{"model": "other"}], "model": "net"}', b"/v1/rerank"),
        (FORM, form(b"net"), b"/v1/audio/transcriptions"),
        (b'content-type: multipart/form-data; boundary="xx"', form(b"net"), b"/v1/images/ocr"),
    ],
)
def test_task_endpoints_route_by_the_model_in_the_body(kind: bytes, body: bytes, path: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        worker = net()
        async with cluster(tmp_path, worker, base=BASE) as front:
            got = await front.ask(post(body, path, kind))
            assert (got.status, got.body == body, worker.requests[0].target) == (200, True, path)

    run(main())


def test_an_alias_is_replaced_where_the_model_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        worker = net()
        async with working(worker), fronting(tmp_path) as front:
            names = Dispatch(aliases={"alias": "net"})
            draft = tmp_path / "draft"
            draft.write_bytes(msgspec.json.encode(Snapshot(1, (routes(worker, base=BASE),), names)))
            draft.replace(tmp_path / "snapshot.json")
            await front.ready()

            await front.ask(post(b"{}", b"/v2/models/alias/infer"))
            await front.get(b"/v2/models/alias")
            await front.ask(post(b'{"model":"alias","query":1}', b"/v1/rerank"))
            await front.ask(post(form(b"alias"), b"/v1/audio/speech", FORM))

        assert [each.target for each in worker.requests[:2]] == [INFER, b"/v2/models/net"]
        assert worker.bodies[2:] == [b'{"model":"net","query":1}', form(b"net")]

    run(main())


def test_upstream_deadline_excludes_time_queued_in_the_gateway(tmp_path: Path) -> None:
    def slow(exchange: Exchange) -> None:
        asyncio.get_running_loop().call_later(0.1, echo, exchange)

    worker = net(slow)
    worker.report = replace(worker.report, capacity=1)
    fields = (b"content-type: x-forebay-deadline-ms", b"x-forebay-deadline-ms: 60000")  # a value that looks like it

    async def main() -> None:
        async with cluster(tmp_path, worker, base=BASE) as front, asyncio.TaskGroup() as group:
            asked = [group.create_task(front.ask(post(b"{}", INFER, *fields))) for _ in range(4)]
            assert {(await task).status for task in asked} == {200}

    run(main())
    left_ms = [int(each.header(b"x-forebay-deadline-ms") or b"") for each in worker.requests]
    assert 0 < min(left_ms) <= 59_980, "one was queued for about 100 ms"
    assert {each.header(b"content-type") for each in worker.requests} == {b"x-forebay-deadline-ms"}


def test_rejected_tensor_request_is_retried_elsewhere_unless_in_a_sequence(tmp_path: Path) -> None:
    async def main() -> None:
        full = failing(503, "overloaded", RETRYABLE)
        workers = (net(full), net(index=1))
        async with cluster(tmp_path, *workers, base=BASE) as front:
            for _ in range(4):
                assert (await front.ask(post(b"{}", INFER))).status == 200
            answers = [await front.ask(post(sequence(id), INFER)) for id in range(1, 21)]

            assert {each.status for each in answers} == {200, 503}
            refused = next(each for each in answers if each.status == 503)
            assert error(refused) == "m"  # as the replica says itself
            assert len(workers[1].requests) == 4 + sum(each.status == 200 for each in answers)

    run(main())


def test_a_step_of_a_sequence_whose_kept_connection_breaks_is_not_sent_again(tmp_path: Path) -> None:
    def once(exchange: Exchange) -> None:
        worker.answer = echo
        exchange.abort()

    worker = net()

    async def main() -> None:
        async with cluster(tmp_path, worker, base=BASE) as front:
            assert (await front.ask(post(sequence(1), INFER))).status == 200
            worker.answer = once
            lost = await front.ask(post(sequence(1, start=False), INFER))
            assert (lost.status, len(worker.requests)) == (502, 2)
            assert (await front.ask(post(b"{}", INFER))).status == 200
            worker.answer = once
            assert (await front.ask(post(b"{}", INFER))).status == 200, "sent again: it belongs to no sequence"
            assert len(worker.requests) == 5

    run(main())


@pytest.mark.parametrize("band", [b"batch", b"default"])
def test_a_step_of_a_sequence_is_not_preempted(band: bytes, tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        worker = net(held.append)
        worker.report = replace(worker.report, capacity=1)
        async with cluster(tmp_path, worker, base=BASE) as front, asyncio.TaskGroup() as group:
            priority = b"x-forebay-priority: "
            steps = [group.create_task(front.ask(post(sequence(n), INFER, priority + band))) for n in (1, 2)]
            await until(lambda: len(held) == 2)
            worker.answer = echo
            urgent = group.create_task(front.ask(post(b"{}", INFER, priority + b"interactive")))
            async with asyncio.timeout(10):
                while await front.metric('forebay_queue_depth{model="net"}') != 1:
                    await asyncio.sleep(0.005)
            for exchange in held:
                echo(exchange)
            assert [(await each).status for each in (*steps, urgent)] == [200] * 3
            assert sorted(worker.bodies) == sorted([b"{}", sequence(1), sequence(2)])

    run(main())


@pytest.mark.parametrize("policy", list(Policy))
def test_a_sequence_stays_at_one_replica_whatever_the_policy(policy: Policy, tmp_path: Path) -> None:
    async def main() -> None:
        workers = [net(index=index) for index in range(3)]
        async with cluster(tmp_path, *workers, base=replace(BASE, policy=policy)) as front:
            binary = b"inference-header-content-length: %d"
            for id in (1, "b", 3, "four", 5, 6):
                body = sequence(id)
                where = set()
                for extra in (b"", b"\xff" * 16):
                    got = await front.ask(post(body + extra, INFER, binary % len(body)))
                    where.add(got.headers[b"x-forebay-replica"])
                top = msgspec.json.encode({"text": "x", "sequence_id": id})
                where.add((await front.ask(post(top, b"/v2/models/net/generate"))).headers[b"x-forebay-replica"])
                assert len(where) == 1
            assert sum(bool(each.requests) for each in workers) > 1

    run(main())


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_compressed_step_stays_with_its_sequence(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    coding = b"content-encoding: gzip" if compress is gzip.compress else b"content-encoding: deflate"

    async def main() -> None:
        workers = [net(index=index) for index in range(3)]
        async with cluster(tmp_path, *workers, base=BASE) as front:
            for id in range(1, 5):
                body = sequence(id)
                binary = b"inference-header-content-length: %d" % len(body)
                steps = [post(body, INFER), post(compress(body), INFER, coding)]
                steps += [post(compress(body + b"\xff" * 4096), INFER, coding, binary)] * 4
                answers = [await front.ask(step) for step in steps]
                assert {each.status for each in answers} == {200}
                assert len({each.headers[b"x-forebay-replica"] for each in answers}) == 1
            for broken in (b"no gzip", compress(sequence(9))[:-9]):
                assert (await front.ask(post(broken, INFER, coding))).status == 200, "its replica reports that"

    run(main())


def test_a_sequence_stays_at_its_replica_while_the_breaker_of_that_is_open(tmp_path: Path) -> None:
    async def main() -> None:
        workers = {f"net-{index}": net(index=index) for index in range(2)}
        async with cluster(tmp_path, *workers.values(), base=BASE) as front:
            await until(lambda: all(each.polls > 1 for each in workers.values()))
            begun = [await front.ask(post(sequence(id), INFER)) for id in range(1, 9)]
            homes = [each.headers[b"x-forebay-replica"].decode() for each in begun]
            assert set(homes) == workers.keys()
            workers["net-0"].answer = failing(500, "internal_error")
            while await front.metric('forebay_replica_breaker{model="net",replica="net-0",state="open"}') != 1:
                await front.ask(post(b"{}", INFER))
            workers["net-0"].answer = echo
            for id, home in enumerate(homes, 1):
                got = await front.ask(post(sequence(id, start=False), INFER))
                assert got.headers[b"x-forebay-replica"] == home.encode()

    run(main())


def test_late_response_dropped_by_its_replica_is_a_deadline_error(tmp_path: Path) -> None:
    async def main() -> None:
        def late(exchange: Exchange) -> None:
            exchange.respond(504, [JSON], b'{"error":"its deadline cannot be met: 2 ms are left"}')

        workers = [net(late), net(late, 1)]
        async with cluster(tmp_path, *workers, base=BASE) as front:
            got = await front.ask(post(b"{}", INFER, b"x-forebay-deadline-ms: 2000"))
            assert (got.status, error(got)) == (504, "its deadline cannot be met: 2 ms are left")
            assert await front.metric('forebay_requests_total{code="deadline_exceeded",model="net"}') == 1
            assert sum(len(each.requests) for each in workers) == 1, "another one is not faster"

    run(main())


def test_a_hedged_stream_that_has_not_begun_ends_at_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [net(silent), net(silent, 1)]
        async with cluster(tmp_path, *workers, base=replace(BASE, hedge_after_s=0.02)) as front:
            await until(lambda: all(worker.polls for worker in workers))
            late = await front.ask(post(b"{}", b"/v2/models/net/generate_stream", b"x-forebay-deadline-ms: 300"))
            assert (late.status, error(late)) == (
                504,
                "The answer had not started within 300 ms (x-forebay-deadline-ms).",
            )
            assert await front.metric('forebay_in_flight{model="net"}') == 0
            assert await front.metric('forebay_hedges_total{model="net",outcome="lost"}') == 1

    run(main())


def test_protocol_errors_keep_their_form_and_client_errors_do_not_trip_breakers(tmp_path: Path) -> None:
    async def main() -> None:
        def bad(exchange: Exchange) -> None:
            exchange.respond(400, [JSON], b'{"error":"unexpected shape"}')

        async with cluster(tmp_path, net(bad), base=BASE) as front:
            for _ in range(30):
                got = await front.ask(post(b"{}", INFER))
                assert (got.status, error(got)) == (400, "unexpected shape")
            assert await front.metric('forebay_requests_total{code="invalid_request",model="net"}') == 30
            closed = 'forebay_replica_breaker{model="net",replica="net-0",state="closed"}'
            assert await front.metric(closed) == 1

            for request, status, said in (
                (post(b"{}", b"/v2/models/none/infer"), 404, "`none` does not exist"),
                (post(b"{}", b"/v1/chat/completions"), 400, "model"),
                (post(b'{"model":"net"}', b"/v1/chat/completions"), 400, "serves tensor requests"),
                (post(b'{"query":1}', b"/v1/rerank"), 400, "model"),
                (post(b'{"model":"net","query":"\\ud83d"}', b"/v1/rerank"), 400, "half of a surrogate pair"),
                (post(b"{", b"/v1/rerank"), 400, "not valid JSON"),
                (post(b"--xx--", b"/v1/audio/speech", FORM), 400, "no field `model`"),
                (b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % INFER, 405, "takes POST"),
                (post(b"", b"/v2/models/net"), 405, "takes GET"),
            ):
                got = await front.ask(request)
                assert (got.status, said in got.body.decode()) == (status, True), got.body

    run(main())


def test_gateway_serves_metadata_itself_and_rejects_repository_changes(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, net(), base=BASE) as front:
            assert (await front.get(b"/v2/health/live")).status == 200
            assert (await front.get(b"/v2/health/ready")).status == 200
            assert msgspec.json.decode((await front.get(b"/v2")).body)["name"] == "forebay"
            index = await front.ask(post(b"", b"/v2/repository/index"))
            assert msgspec.json.decode(index.body) == [{"name": "net", "state": "READY"}]
            for path, status, said in (
                (b"/v2/repository/models/net/load", 405, "forebay reload"),
                (b"/v2/repository/models/net/unload", 405, "forebay reload"),
                (b"/v2/systemsharedmemory/region/a/register", 404, "single model server"),
                (b"/v2/models/net/trace/setting", 404, "single model server"),
                (b"/v2/models/stats", 404, "single model server"),
                (b"/v2/nothing", 404, "No such path"),
                (b"/v2", 405, "takes GET"),
            ):
                got = await front.ask(post(b"{}", path))
                assert (got.status, said in error(got)) == (status, True)

    run(main())


def test_metadata_requests_for_an_unserved_model_are_not_queued(tmp_path: Path) -> None:
    async def main() -> None:
        worker = net()
        async with cluster(tmp_path, worker, base=BASE) as front:
            worker.report = replace(worker.report, state=ReplicaState.WARMING)
            async with asyncio.timeout(10):
                while (await front.get(b"/v2/health/ready")).status == 200:
                    await asyncio.sleep(0.005)
            asked = [await front.get(b"/v2/models/net" + end) for end in (b"", b"/ready", b"/config", b"/stats")]
            index = await front.ask(post(b"", b"/v2/repository/index"))

        assert [each.status for each in asked] == [503] * 4
        assert b"UNAVAILABLE" in index.body
        assert not worker.requests

    run(main())


def test_tensor_stream_is_relayed_in_pieces_and_cut_when_its_replica_is_lost(tmp_path: Path) -> None:
    held: list[Exchange] = []

    def begin(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        exchange.write(b"data: 1\n\n")
        held.append(exchange)

    async def main() -> None:
        async with cluster(tmp_path, net(begin), base=BASE) as front:
            for whole in (True, False):
                async with peer(front.port) as client:
                    client.send(post(b'{"a":1}', b"/v2/models/net/generate_stream"))
                    async with asyncio.timeout(10):
                        await client.reader.readuntil(b"data: 1\n\n")
                    exchange = held.pop()
                    if whole:
                        exchange.write(b"data: 2\n\n")
                        exchange.end()
                        async with asyncio.timeout(10):
                            assert b"data: 2\n\n" in await client.reader.readuntil(b"0\r\n\r\n")
                    else:
                        exchange.abort()
                        assert b"0\r\n\r\n" not in await client.rest()

    run(main())


@contextlib.asynccontextmanager
async def pair(folder: Path, first: Worker, second: Worker, **more: Any) -> AsyncIterator[Front]:
    """Two models, of which the second steps in for the first."""
    async with working(first, second):
        both: tuple[ModelRoutes, ...] = (
            routes(first, base=replace(BASE, fallback=(StandIn(second.model),))),
            routes(second, base=replace(BASE, name=second.model)),
        )
        async with fronting(folder, *both, **more) as front:
            await front.ready()
            yield front


def test_no_step_of_a_sequence_goes_to_a_fallback_model(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = net(), net(model="spare")
        async with pair(tmp_path, first, second) as front:
            await until(lambda: first.polls > 1 < second.polls)
            assert (await front.ask(post(sequence(1), INFER))).headers[b"x-forebay-model"] == b"net"
            first.report = replace(first.report, state=ReplicaState.WARMING)
            while (await front.ask(post(b"{}", INFER))).headers[b"x-forebay-model"] != b"spare":
                pass
            async with asyncio.TaskGroup() as group:
                step = group.create_task(front.ask(post(sequence(1, start=False), INFER)))
                async with asyncio.timeout(10):
                    while await front.metric('forebay_queue_depth{model="net"}') != 1:
                        await asyncio.sleep(0.005)
                first.report = replace(first.report, state=ReplicaState.READY)
            assert step.result().headers[b"x-forebay-model"] == b"net"

    run(main())


def test_fallback_model_gets_the_tensor_request_under_its_own_name(tmp_path: Path) -> None:
    async def main() -> None:
        full = failing(503, "overloaded", RETRYABLE)
        first, second = net(full), net(model="spare")
        async with pair(tmp_path, first, second) as front:
            for path, body in ((INFER, b"{}"), (b"/v1/classify", b'{"model":"net","input":"x"}')):
                got = await front.ask(post(body, path))
                assert (got.status, got.headers[b"x-forebay-model"]) == (200, b"spare")
            await front.ask(post(form(b"net"), b"/v1/audio/translations", FORM))

        assert second.requests[0].target == b"/v2/models/spare/infer"
        assert second.bodies[1:] == [b'{"model":"spare","input":"x"}', form(b"spare")]

    run(main())


def exchange(target: bytes, *headers: tuple[bytes, bytes]) -> Exchange:
    return lone(b"POST", target, dict(headers))


def test_only_model_paths_of_the_protocol_are_routed() -> None:
    def found(target: bytes) -> tuple[str, bytes] | None:
        endpoint = tensor.find(exchange(target))
        return (endpoint.model, endpoint.method) if endpoint is not None else None

    assert found(b"/v2/models/a%20b/versions/1/infer") == ("a b", b"POST")
    assert found(b"/v2/models/net/stats?x") == ("net", b"GET")
    assert found(b"/v2/models/stats/stats") == ("stats", b"GET")
    for target in (
        b"/v2/models/stats?x",
        b"/v2/models/",
        b"/v2/models/a/b",
        b"/v2/models/a/versions/x/infer",
        b"/v2/models/a/trace/setting",
    ):
        assert found(target) is None


@given(
    st.sampled_from([INFER, b"/v2/models/net/generate", b"/v1/rerank", b"/v1/audio/speech"]),
    st.binary(max_size=80) | st.text(max_size=40).map(lambda text: b'{"sequence_id":%b}' % text.encode()),
    st.sampled_from([b"", b"application/json", b"application/octet-stream", b"multipart/form-data; boundary=x"]),
    st.none() | st.binary(max_size=14),
)
def test_any_tensor_path_is_parsed_or_rejected(target: bytes, body: bytes, kind: bytes, length: bytes | None) -> None:
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"inference-header-content-length", length))
    request = exchange(target, *headers)
    endpoint = tensor.find(request)
    assert endpoint is not None
    with contextlib.suppress(Refusal):
        assert bytes(tensor.request_fields(endpoint, request, body).text) == body


def test_a_model_of_another_task_is_refused_with_what_the_endpoint_needs(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(echo, "words-0", "words"), base=replace(ROUTES, name="words")) as front:
            got = await front.ask(post(b'{"model":"words","query":"q","documents":["d"]}', b"/v1/rerank"))
            said = "The model `words` serves chat requests; /v1/rerank needs a model of the task tensor"
            assert (got.status, msgspec.json.decode(got.body)["error"]["message"]) == (
                400,
                f"{said} (a model server).",
            )

    run(main())
