"""The gateway speaks as the API of a path does: errors, ends of broken streams; which models have tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.dispatch.test_dispatch import serving, worker
from tests.gateway.rig import EVENT_STREAM, ROUTES, Worker, chat, cluster, error_code, failing, post
from tests.net.rig import peer, run

from forebay.core.model import Dispatch, Rule, Task
from forebay.net.server import Exchange
from forebay.wire.apis.messages_answer import MessagesAnswer
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.openai_answer import Head, Usage

MESSAGES, RESPONSES = b"/v1/messages", b"/v1/responses"
HEAD = Head("id-1", 1, "chat", "r1")
VOICES: dict[bytes, Any] = {
    MESSAGES: lambda: MessagesAnswer(HEAD),
    RESPONSES: lambda: ResponsesAnswer(HEAD, "msg-1", {}),
}


def last(body: bytes) -> dict[str, Any]:
    """The last event of a stream."""
    name, data = body[body.rindex(b"event: ") :].split(b"\n")[:2]
    document: dict[str, Any] = msgspec.json.decode(data.removeprefix(b"data: "))
    assert name == b"event: " + document["type"].encode()
    return document


@pytest.mark.parametrize(
    "path", [MESSAGES, MESSAGES + b"/count_tokens", RESPONSES, b"/v1/tokenize", b"/v1/detokenize"]
)
def test_requests_of_every_api_are_relayed_to_a_worker_and_back(tmp_path: Path, path: bytes) -> None:
    async def main() -> None:
        worker = Worker()
        async with cluster(tmp_path, worker) as front:
            answer = await front.ask(post(chat(), path))
            assert (answer.status, answer.body) == (200, b'{"object":"chat.completion"}')
            assert worker.requests[0].target == path

    run(main())


def test_errors_about_models_have_the_format_of_the_clients_api(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            get = b"GET /v1/models/nobody HTTP/1.1\r\nhost: a\r\n%b\r\n"
            answer = await front.ask(get % b"anthropic-version: 2023-06-01\r\n")
            document = msgspec.json.decode(answer.body)
            assert (answer.status, document["type"], document["error"]["type"]) == (404, "error", "not_found_error")
            assert "type" not in msgspec.json.decode((await front.ask(get % b"")).body)

    run(main())


def test_token_endpoints_serve_language_and_embedding_models(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), base=replace(ROUTES, task=Task.EMBED)) as front:
            assert (await front.ask(post(chat(), b"/v1/tokenize"))).status == 200
            assert (await front.ask(post(chat(), b"/v1/detokenize"))).status == 200
            assert error_code(await front.ask(post(chat(), MESSAGES))) == "wrong_task"

    run(main())


def test_token_endpoints_refuse_tensor_models(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker(), base=replace(ROUTES, task=Task.TENSOR)) as front:
            answer = await front.ask(post(chat(), b"/v1/tokenize"))
            assert (answer.status, error_code(answer)) == (400, "wrong_task")
            assert b"/v1/tokenize needs a model of the task chat or embed." in answer.body

    run(main())


@pytest.mark.parametrize(
    ("task", "path"), [(Task.EMBED, b"/v1/tokenize"), (Task.TENSOR, b"/v1/embeddings")], ids=["tokens", "vectors"]
)
def test_a_rule_leads_to_every_model_that_its_name_would(tmp_path: Path, task: Task, path: bytes) -> None:
    async def main() -> None:
        dispatch = Dispatch({}, (Rule("auto", "m"),))
        async with serving(tmp_path, (worker("m"), {"task": task}), dispatch=dispatch) as front:
            for name in ("m", "auto"):
                answer = await front.ask(post(chat(name), path))
                assert (answer.status, answer.body) == (200, b'{"model":"m"}')

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "kind", "code"),
    [
        (b"{", 400, "invalid_request_error", "invalid_json"),
        (chat("nobody"), 404, "not_found_error", "model_not_found"),
    ],
)
def test_gateway_rejections_of_messages_have_anthropics_error_format(
    tmp_path: Path, body: bytes, status: int, kind: str, code: str
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, Worker()) as front:
            answer = await front.ask(post(body, MESSAGES))
            document = msgspec.json.decode(answer.body)
            assert (answer.status, document["type"], document["error"]["type"]) == (status, "error", kind)
            assert document["error"]["details"]["error_code"] == code
            assert answer.headers[b"request-id"] == answer.headers[b"x-request-id"]
            assert b"request-id" not in (await front.ask(post(body))).headers

    run(main())


def test_without_capacity_the_messages_endpoint_answers_overloaded_error(tmp_path: Path) -> None:
    async def main() -> None:
        busy = failing(503, "overloaded", (b"x-forebay-retryable", b"1"))
        async with cluster(tmp_path, Worker(busy)) as front:
            answer = await front.ask(post(chat(), MESSAGES))
            error = msgspec.json.decode(answer.body)["error"]
            assert (answer.status, error["type"], error["code"]) == (503, "overloaded_error", "overloaded")
            assert answer.headers[b"request-id"] == answer.headers[b"x-request-id"]

    run(main())


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_stream_that_broke_for_good_ends_in_an_error_event_of_its_api(tmp_path: Path, path: bytes) -> None:
    def broken(exchange: Exchange) -> None:
        voice = VOICES[path]()
        exchange.start(200, [EVENT_STREAM])
        exchange.write(voice.opening(0) + voice.delta(0, "a") + voice.delta(0, "never sent whole")[:-9])
        exchange.end([(b"x-forebay-error", b"internal_error")])

    async def main() -> None:
        workers = [Worker(broken, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front:
            async with peer(front.port) as client:
                client.send(post(chat(stream=True), path))
                raw = await client.rest()
            assert not raw.endswith(b"0\r\n\r\n")
            event = last(raw)
            assert event["type"] == "error"
            if path == MESSAGES:
                assert (event["error"]["type"], event["error"]["code"]) == ("api_error", "stream_interrupted")
            else:
                assert (event["code"], event["sequence_number"]) == ("stream_interrupted", 5)
            assert sum(len(worker.requests) for worker in workers) == 1

    run(main())


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_stream_missing_only_its_trailers_is_complete(tmp_path: Path, path: bytes) -> None:
    def hasty(exchange: Exchange) -> None:
        voice = VOICES[path]()
        exchange.start(200, [EVENT_STREAM])
        exchange.write(
            voice.opening(0) + voice.delta(0, "a") + voice.finish(0, "stop", None) + voice.end(Usage(1, 1))
        )
        exchange.abort()

    async def main() -> None:
        async with cluster(tmp_path, Worker(hasty)) as front:
            answer = await front.ask(post(chat(stream=True), path))
            assert last(answer.body)["type"] in ("message_stop", "response.completed")
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 1

    run(main())
