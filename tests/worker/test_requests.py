"""A worker through the official OpenAI client and through bare HTTP."""

import base64
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from tests.worker.rig import Worker, until, worker

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("chat"), settings={"step_ms": 1.0}) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def client(chat: Worker) -> Iterator[OpenAI]:
    with chat.client() as client:
        yield client


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("embed"), task="embed", settings={"dimensions": 8}) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def embedder(embed: Worker) -> Iterator[OpenAI]:
    with embed.client() as client:
        yield client


def post(on: Worker, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return on.http.post(on.url + path, content=content, headers=headers)


def test_a_chat_answer_is_complete(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HI, max_tokens=6, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", "m", "rev-1")
    assert answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same_as_the_whole_answer(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_come_side_by_side_and_each_seed_gives_its_own_again(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 10, "n": 3, "seed": 7}
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert whole.usage is not None
    one = client.chat.completions.create(**asked | {"n": 1})
    assert one.usage is not None
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens
    assert one.choices[0].message.content == texts[0]
    streamed, order = ["", "", ""], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        order.append(chunk.choices[0].index)
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert order != sorted(order)


def test_log_probabilities_come_whole_and_streamed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    asked["seed"] = 1
    logprobs = client.chat.completions.create(**asked).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2, 2, 2]
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        if (part := chunk.choices[0].logprobs) is not None
        for token in part.content or []
    ]
    assert streamed == logprobs.content


def test_stop_ends_an_answer_before_the_stop_string(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 20, "seed": 3}
    full = client.chat.completions.create(**asked).choices[0].message.content
    assert full is not None
    stop = full.split()[3]
    cut = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == full[: full.index(stop)]


def test_a_schema_shapes_the_answer(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="m", messages=HI, max_tokens=50, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["a"], int)
    free = client.chat.completions.create(
        model="m", messages=HI, max_tokens=50, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)


def test_completions_take_batches_tokens_and_echo(client: OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["one two", "three"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    single = client.completions.create(model="m", prompt="three", n=2, max_tokens=3, seed=1)
    assert [choice.text for choice in single.choices] == [choice.text for choice in answer.choices[2:]]
    assert client.completions.create(model="m", prompt=[[1, 2], [3]], max_tokens=2).choices[1].text
    echoed = client.completions.create(model="m", prompt="three", max_tokens=3, seed=1, echo=True)
    assert echoed.choices[0].text == "three" + single.choices[0].text
    chunks = client.completions.create(model="m", prompt="three", max_tokens=3, seed=1, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_completion_log_probabilities_say_where_tokens_begin(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 4, "logprobs": 1, "seed": 2}
    choice = client.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens is not None
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    offsets = [
        offset
        for chunk in client.completions.create(**asked, stream=True)
        if (part := chunk.choices[0].logprobs) is not None
        for offset in part.text_offset or []
    ]
    assert offsets == choice.logprobs.text_offset


def test_embeddings_come_as_floats_and_base64_in_order(embedder: OpenAI) -> None:
    texts = ["alpha", "beta", "gamma"]
    floats = embedder.embeddings.create(model="m", input=texts, encoding_format="float")
    assert [item.index for item in floats.data] == [0, 1, 2]
    default = embedder.embeddings.create(model="m", input=texts)
    assert [item.embedding for item in default.data] == [item.embedding for item in floats.data]
    raw: Any = embedder.embeddings.create(model="m", input="beta", encoding_format="base64").data[0].embedding
    assert list(struct.unpack("<8f", base64.b64decode(raw))) == floats.data[1].embedding
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 0
    assert len(embedder.embeddings.create(model="m", input=[[1, 2], [3]], dimensions=8).data) == 2
    assert len(embedder.embeddings.create(model="m", input=["x"] * 300).data) == 300


def test_dimensions_that_the_model_does_not_have_are_refused(embedder: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embedder.embeddings.create(model="m", input="x", dimensions=4)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "dimensions")
    assert "always gives 8" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", b"{", (400, "invalid_json", None)),
        ("/v1/chat/completions", {"model": "m"}, (400, "invalid_request", "messages")),
        ("/v1/chat/completions", {"model": "other", "messages": HI}, (404, "model_not_found", "model")),
        ("/v1/chat/completions", {"model": "m", "messages": HI, "tools": [{}]},
         (400, "unsupported_parameter", "tools")),
        ("/v1/chat/completions", {"model": "m", "messages": HI, "max_tokens": 99_999},
         (400, "context_length_exceeded", "max_tokens")),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x y " * 5000}]},
         (400, "context_length_exceeded", "messages")),
        ("/v1/chat/completions", {"model": "m", "messages": HI, "max_completion_tokens": 99_999},
         (400, "context_length_exceeded", "max_completion_tokens")),
        ("/v1/completions", {"model": "m", "prompt": ["hi", "x y " * 5000], "n": 2},
         (400, "context_length_exceeded", "prompt[1]")),
        ("/v1/completions", {"model": "m", "prompt": [1] * 9000}, (400, "context_length_exceeded", "prompt")),
        ("/v1/completions", {"model": "m", "prompt": "z" * 600_000}, (400, "context_length_exceeded", "prompt")),
        ("/v1/completions", {"model": "m", "prompt": ""}, (400, "invalid_request", "prompt")),
        ("/v1/embeddings", {"model": "m", "input": "x"}, (400, "wrong_task", "model")),
        ("/v1/chat/completions", {"model": "m", "messages": HI, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "sandwich"}}}},
         (400, "invalid_request", "response_format")),
        ("/v9", {}, (404, "not_found", None)),
        ("/load", {}, (405, "method_not_allowed", None)),
    ],
)  # fmt: skip
def test_refusals_carry_openais_error_object(
    chat: Worker, path: str, body: Any, expected: tuple[int, str, str | None]
) -> None:
    answer = post(chat, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == expected
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "x-forebay-retryable" not in answer.headers
    assert chat.idle().in_flight == 0


def test_an_embedding_model_does_not_chat(embed: Worker) -> None:
    error = post(embed, "/v1/chat/completions", {"model": "m", "messages": HI}).json()["error"]
    assert error["code"] == "wrong_task"
    assert "/v1/embeddings" in error["message"]


def test_the_method_matters(chat: Worker) -> None:
    answer = chat.http.get(f"{chat.url}/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_the_request_id_comes_back_unless_it_is_unfit(chat: Worker) -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 1}
    assert post(chat, "/v1/chat/completions", body, **{"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert post(chat, "/v1/chat/completions", b"{", **{"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    until("a log line with the id", lambda: '"abc-2"' in chat.log())
    for unfit in ("x" * 200, "a b"):
        new = post(chat, "/v1/chat/completions", body, **{"x-request-id": unfit}).headers["x-request-id"]
        assert new.startswith("req-")


def test_usage_goes_to_the_gateway_in_a_header_or_a_trailer(chat: Worker) -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 3}
    whole = post(chat, "/v1/chat/completions", body)
    usage = f"{whole.json()['usage']['prompt_tokens']},3,0"
    assert whole.headers["x-forebay-usage"] == usage
    content = json.dumps(body | {"stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection((chat.endpoint.host, chat.endpoint.port), timeout=20) as raw:
        raw.sendall(head % len(content) + content)
        answer = b"".join(iter(lambda: raw.recv(65_536), b""))
    assert answer.endswith(f"data: [DONE]\n\n\r\n0\r\nx-forebay-usage: {usage}\r\n\r\n".encode())
    begun = f"\r\nx-forebay-usage: {whole.json()['usage']['prompt_tokens']},0,0\r\n".encode()
    assert begun in answer.partition(b"\r\n\r\n")[0] + b"\r\n"


def test_heads_of_streams_differ_for_a_gateway_in_their_token_counts_only(chat: Worker) -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 1, "stream": True}
    heads = [
        post(chat, "/v1/chat/completions", body, **{"x-forebay-gateway": "1", "x-request-id": id}).headers
        for id in ("one", "two")
    ]
    for head in heads:
        head.pop("date", None)
    assert heads[0] == heads[1]
    message = {"x-forebay-gateway": "1", "x-request-id": "one"}
    assert post(chat, "/v1/messages", body, **message).headers["request-id"] == "one"


def test_of_several_prompts_nothing_is_told_before_all_of_them_are_read(chat: Worker, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": ["one", "one two"], "max_tokens": 3, "stream": True, "n": 2}
    assert post(chat, "/v1/completions", body).headers["x-forebay-usage"].endswith(",0,0")
    with worker(tmp_path, settings={"concurrency": 1}) as narrow:
        narrow.ready()
        assert "x-forebay-usage" not in post(narrow, "/v1/completions", body).headers
        assert post(narrow, "/v1/completions", body | {"stream": False}).headers["x-forebay-usage"]


def test_health_load_and_metrics_are_served(chat: Worker, client: OpenAI) -> None:
    client.chat.completions.create(model="m", messages=HI, max_tokens=5)
    assert chat.http.get(f"{chat.url}/livez").status_code == 200
    assert chat.http.get(f"{chat.url}/readyz").text == "ready\n"
    load = chat.idle()
    assert (load.replica, load.model, load.revision, load.state) == ("m-0", "m", "rev-1", "ready")
    assert load.capacity == 64
    assert load.kv_total_tokens == 262_144
    assert chat.metric("worker_requests_total", code="ok", endpoint="chat/completions") >= 1
    assert chat.metric("worker_requests_total", code="unsupported_parameter") >= 0
    assert chat.metric("worker_generated_tokens_total") >= 5
    assert chat.metric("worker_ttft_seconds_count") >= 1
    assert chat.metric("worker_tpot_seconds_count") >= 1
    assert chat.metric("worker_e2e_seconds_count") >= 1
    assert chat.metric("worker_engine_up") == 1
