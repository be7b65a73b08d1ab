"""What clients see: answers, errors, ids, models, health."""

import gzip
from pathlib import Path

import msgspec
import pytest
from tests.gateway.rig import (
    CHAT,
    ROUTES,
    USAGE,
    Worker,
    chat,
    cluster,
    error_code,
    events,
    failing,
    fronting,
    post,
    read_until,
)
from tests.net.rig import peer, run, until

from forebay.core.model import Limits
from forebay.net.server import Exchange


def test_a_whole_answer_is_relayed_verbatim_without_the_workers_private_headers(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker) as front:
            answer = await front.ask(post(chat(), CHAT, b"x-request-id: mine-1"))
            assert (answer.status, answer.body) == (200, b'{"object":"chat.completion"}')
            assert answer.headers[b"x-request-id"] == b"mine-1"
            assert answer.headers[b"x-forebay-replica"] == b"chat-0"
            assert answer.headers[b"x-forebay-model-revision"] == b"r1"
            assert USAGE[0] not in answer.headers
            assert worker.bodies == [chat()]
            assert worker.requests[0].header(b"x-request-id") == b"mine-1"
            assert await front.metric('forebay_prompt_tokens_total{model="chat"}') == 7
            assert await front.metric('forebay_completion_tokens_total{model="chat"}') == 3
            assert await front.metric('forebay_cached_tokens_total{model="chat"}') == 2
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 1

    run(main())


def test_a_stream_is_relayed_event_by_event_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(events)) as front:
            answer = await front.ask(post(chat(stream=True)))
            assert answer.body == b'data: {"n":0}\n\ndata: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'
            assert answer.trailers == {}
            assert answer.headers[b"content-type"].startswith(b"text/event-stream")
            assert await front.metric('forebay_stream_events_total{model="chat"}') == 4
            assert await front.metric('forebay_ttft_seconds_count{model="chat"}') == 1
            assert await front.metric('forebay_tpot_seconds_count{model="chat"}') == 1
            assert await front.metric('forebay_completion_tokens_total{model="chat"}') == 3

    run(main())


def test_an_unfinished_event_is_held_back_until_it_is_complete(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(lambda _: None)
        async with cluster(tmp_path, worker) as front, peer(front.port) as client:
            client.send(post(chat()))
            await until(lambda: bool(worker.requests))
            exchange = worker.requests[0]
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            exchange.write(b"data: 1\n\ndata: hal")
            await read_until(client, b"data: 1\n\n\r\n")
            exchange.write(b"f\n")
            exchange.write(b"\n")
            assert b"data: half\n\n" in await read_until(client, b"\n\n\r\n")
            exchange.write(b"data: [DONE]\n\n")
            exchange.end()
            await read_until(client, b"0\r\n\r\n")

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b'{"model": "chat"} x', 400, "invalid_json", None),
        (b"\xff", 400, "invalid_json", None),
        (b'{"model": "\xff"}', 400, "invalid_json", None),
        (b"[]", 400, "invalid_request", None),
        (b"{}", 400, "invalid_request", "model"),
        (b'{"model": 1}', 400, "invalid_request", "model"),
        (b'{"model": null}', 400, "invalid_request", "model"),
        (b'{"model": "chat", "stream": "yes"}', 400, "invalid_request", "stream"),
        (b'{"model": "nobody"}', 404, "model_not_found", "model"),
        (b'{"model": "' + b"x" * 5000 + b'"}', 404, "model_not_found", "model"),
    ],
)
def test_invalid_body_is_rejected_with_the_field_named(
    tmp_path: Path, body: bytes, status: int, code: str, param: str | None
) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker) as front:
            answer = await front.ask(post(body))
            error = msgspec.json.decode(answer.body)["error"]
            assert (answer.status, error["code"], error["param"]) == (status, code, param)
            assert set(error) == {"message", "type", "param", "code"}
            assert len(error["message"]) < 400
            assert answer.headers[b"x-request-id"].startswith(b"req-")
            assert not worker.requests
            assert await front.metric(f'forebay_requests_total{{code="{code}",model="unknown"}}') == 1

    run(main())


@pytest.mark.parametrize("path", [CHAT, b"/v1/embeddings", b"/v1/messages", b"/v1/rerank"])
@pytest.mark.parametrize("coding", [b"gzip", b"GZIP, br"])
def test_compressed_body_is_rejected_with_its_header_named(tmp_path: Path, path: bytes, coding: bytes) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            answer = await front.ask(post(gzip.compress(chat()), path, b"content-encoding: " + coding))
            error = msgspec.json.decode(answer.body)["error"]
            assert (answer.status, error["code"], error["param"]) == (415, "unsupported_encoding", "content-encoding")
            assert f"`content-encoding: {coding.decode()}`" in error["message"]

    run(main())


def test_identity_content_encoding_is_accepted(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            assert (await front.ask(post(chat(), CHAT, b"content-encoding: identity"))).status == 200
            answer = await front.ask(post(b"{", CHAT, b"content-encoding: Identity"))
            assert (answer.status, error_code(answer)) == (400, "invalid_json")

    run(main())


def test_unknown_paths_and_methods_are_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            for request, code in (
                (b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n", "not_found"),
                (b"GET /v1/chat/completions HTTP/1.1\r\nhost: a\r\n\r\n", "method_not_allowed"),
                (post(b"", b"/livez"), "method_not_allowed"),
                (b"GET /v1/models/nobody HTTP/1.1\r\nhost: a\r\n\r\n", "model_not_found"),
                (post(chat(), b"/v1/embeddings"), "wrong_task"),
                (b"garbage\r\n\r\n", "bad_http"),
            ):
                assert error_code(await front.ask(request)) == code
            assert await front.metric('forebay_requests_total{code="bad_http",model="unknown"}') == 1

    run(main())


def test_a_query_does_not_change_the_endpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            assert (await front.ask(post(chat(), CHAT + b"?api-version=1"))).status == 200
            assert (await front.get(b"/livez?x")).status == 200

    run(main())


@pytest.mark.parametrize("given", [b"has space", b"x" * 129, b"\xc3\xa4"])
def test_a_request_id_that_is_not_short_visible_ascii_is_replaced(tmp_path: Path, given: bytes) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker) as front:
            answer = await front.ask(post(chat(), CHAT, b"x-request-id: " + given))
            assert answer.headers[b"x-request-id"].startswith(b"req-")
            assert worker.requests[0].header(b"x-request-id") == answer.headers[b"x-request-id"]

    run(main())


def test_an_error_of_the_worker_is_passed_on_and_counted_by_its_code(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(failing(400, "context_length_exceeded"))) as front:
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer)) == (400, "context_length_exceeded")
            line = 'forebay_requests_total{code="context_length_exceeded",model="chat"}'
            assert await front.metric(line) == 1

    run(main())


def test_answer_larger_than_the_buffer_is_relayed_unbuffered(tmp_path: Path) -> None:
    async def main() -> None:
        large = b"x" * 3_000_000
        worker = Worker(lambda exchange: exchange.respond(200, [], large))
        async with cluster(tmp_path, worker, response_buffer_bytes_max=100_000) as front:
            answer = await front.ask(post(chat()))
            assert answer.body == large
            assert b"content-length" not in answer.headers

    run(main())


def test_a_large_answer_reaches_a_client_that_reads_slowly(tmp_path: Path) -> None:
    async def main() -> None:
        large = b"x" * 4_000_000
        worker = Worker(lambda exchange: exchange.respond(200, [], large))
        async with cluster(tmp_path, worker) as front, peer(front.port, receive_bytes=4096) as client:
            client.send(post(chat()))
            assert (await client.answer()).body == large

    run(main())


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/models/chat", b"/v1/models/nobody", b"/nothing"])
def test_responses_without_a_replica_have_a_request_id(tmp_path: Path, path: bytes) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            given = await front.ask(b"GET %b HTTP/1.1\r\nhost: a\r\nx-request-id: mine-7\r\n\r\n" % path)
            assert given.headers[b"x-request-id"] == b"mine-7"
            anthropics = b"mine-7" if path.startswith(b"/v1/models") else None
            assert given.headers.get(b"request-id") == anthropics
            assert (await front.get(path)).headers[b"x-request-id"].startswith(b"req-")

    run(main())


def test_models_are_listed_and_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            listed = msgspec.json.decode((await front.get(b"/v1/models")).body)
            assert listed["object"] == "list"
            assert [m["id"] for m in listed["data"]] == ["chat"]
            found = msgspec.json.decode((await front.get(b"/v1/models/ch%61t")).body)
            assert found == listed["data"][0]
            assert {"id", "object", "created", "owned_by"} <= set(found)
            assert found["task"] == "chat"

    run(main())


def test_readyz_names_unready_models_and_livez_ignores_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with fronting(tmp_path, ROUTES) as front:
            answer = await front.get(b"/readyz")
            assert answer.status == 503
            assert msgspec.json.decode(answer.body)["missing"] == [{"model": "chat", "reason": "no replica"}]
            assert (await front.get(b"/livez")).status == 200

    run(main())


def test_listener_limits_are_enforced(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), limits=Limits(body_bytes_max=1000)) as front:
            answer = await front.ask(post(chat(pad="x" * 2000)))
            assert (answer.status, error_code(answer)) == (413, "body_too_large")

    run(main())


@pytest.mark.parametrize(
    ("name", "limit", "sent"),
    [
        ("headers_max", 8, post(chat(), CHAT, *(b"x-%d: 1" % n for n in range(9)))),
        ("header_bytes_max", 1024, post(chat(), CHAT, b"x: " + b"y" * 2000)),
        ("body_bytes_max", 1000, post(chat(pad="x" * 2000))),
        ("head_timeout_s", 0.2, b"GET /livez HTTP/1.1\r\n"),
        ("body_timeout_s", 0.2, post(chat())[:-1]),
        ("connections_max", 1, post(chat())),
    ],
)
def test_an_error_names_the_limit_that_was_exceeded(tmp_path: Path, name: str, limit: float, sent: bytes) -> None:
    async def main() -> None:
        limits = Limits(**{name: limit})  # type: ignore[arg-type]  # some are whole numbers
        async with fronting(tmp_path, ROUTES, limits=limits) as front, peer(front.port) as first:
            first.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            await first.answer()
            async with peer(front.port) as client:
                client.send(sent)
                assert f"gateway.limits.{name}".encode() in (await client.answer()).body

    run(main())


def test_the_access_log_has_one_line_per_request_and_no_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(events)) as front:
            await front.ask(post(chat(stream=True), CHAT, b"x-request-id: one"))
            await front.ask(post(b"{"))
            await until(lambda: len(front.lines()) == 2)
            first, second = front.lines()
            assert (first["request_id"], first["model"], first["replica"]) == ("one", "chat", "chat-0")
            assert (first["status"], first["code"], first["stream"]) == (200, "ok", True)
            assert (first["prompt_tokens"], first["completion_tokens"], first["cached_tokens"]) == (7, 3, 2)
            assert (second["status"], second["code"]) == (400, "invalid_json")
            assert b"secret" not in front.access.getvalue()

    run(main())


def test_pipelined_requests_are_answered_in_order_also_behind_a_stream(tmp_path: Path) -> None:
    async def main() -> None:
        def answer(exchange: Exchange) -> None:
            (events if b"stream" in exchange.body else lambda e: e.respond(200, [], b'{"n":2}'))(exchange)

        async with cluster(tmp_path, Worker(answer)) as front, peer(front.port) as client:
            client.send(post(chat(stream=True)) + post(chat()))
            assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
            assert (await client.answer()).body == b'{"n":2}'

    run(main())
