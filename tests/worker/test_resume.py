"""A stream that another replica has begun goes on here, over HTTP: `x-forebay-continue`."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.worker.rig import Worker, worker

from forebay.wire.transcript import TEXTS

pytestmark = pytest.mark.slow

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "Tell me"}}
NAMED: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": HI, "system": "Be brief.", "max_tokens": 12},
    RESPONSES: {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 12, "metadata": {"a": "b"}},
}
"""Bodies of the APIs whose events have names."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("chat"), settings={"step_ms": 0.0}) as started:
        yield started.ready()


def post(on: Worker, path: str, body: dict[str, Any], seam: str | None = None, said: bytes = b"") -> httpx.Response:
    headers = {} if seam is None else {"x-forebay-continue": seam}
    return on.http.post(on.url + path, content=json.dumps(body).encode() + said, headers=headers)


def stream(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "stream": True, "seed": 5, "max_tokens": 12} | BODIES[path] | fields


def events(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text
    return [event + b"\n\n" for event in answer.content.split(b"\n\n")[:-1]]


def chunk(event: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return document


def text_of(begun: list[bytes]) -> bytes:
    """What a client has of the text after these events."""
    choices = [choice for event in begun for choice in chunk(event)["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices).encode()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "seed": None, "stream_options": {"include_usage": True}},
        {"max_tokens": 60, "stop": [" the w", "er t"], "stream_options": {"include_usage": True}},
        {"logprobs": 1, "frequency_penalty": 1.0},
        {"echo": True},
    ],
    ids=str,
)
def test_two_halves_of_a_stream_are_the_whole_byte_for_byte(chat: Worker, path: str, fields: dict[str, Any]) -> None:
    if path == CHAT:
        fields = {key: value for key, value in fields.items() if key != "echo"}
        fields |= {"logprobs": True} if "logprobs" in fields else {}
    body = stream(path, **fields)
    whole = events(post(chat, path, body))
    first = chunk(whole[0])
    finish = next(place for place, event in enumerate(whole) if chunk(event)["choices"][0]["finish_reason"])
    last = finish - 1 if "stop" in fields else finish  # text cut off by a stop string leaves together with its finish
    for end in range(1 if path == CHAT else 0, last + 1):
        said = text_of(whole[:end])
        rest = events(post(chat, path, body, f"{first['id']},{first['created']},{len(said)}", said))
        assert b"".join(whole[:end] + rest) == b"".join(whole)
    assert chat.idle().in_flight == 0


def named(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "stream": True, "temperature": 0} | NAMED[path] | fields


def document(event: bytes) -> dict[str, Any]:
    """The data of an event with a name."""
    name, data = event.split(b"\n")[:2]
    found: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: " + found["type"].encode()
    return found


def named_text(begun: list[bytes]) -> bytes:
    """What a client has of the text after these events."""
    deltas = [each["delta"] for event in begun if (each := document(event))["type"] in TEXTS]
    return "".join(each if isinstance(each, str) else each["text"] for each in deltas).encode()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {}),
        (MESSAGES, {"max_tokens": 60, "stop_sequences": [" the w", "er t"]}),
        (RESPONSES, {}),
        (RESPONSES, {"max_output_tokens": 400}),
    ],
    ids=str,
)
def test_two_halves_of_a_stream_of_named_events_are_the_whole_byte_for_byte(
    chat: Worker, path: str, fields: dict[str, Any]
) -> None:
    body = named(path, **fields)
    whole = events(post(chat, path, body))
    first = document(whole[0])
    begun = first.get("message") or first["response"]
    kinds = [document(event)["type"] for event in whole]
    closing = kinds.index("content_block_stop" if path == MESSAGES else "response.output_text.done")
    assert closing > 8
    last = closing - 1 if "stop_sequences" in fields else closing  # it may leave with the text that a stop cut off
    for end in range(1, last + 1):
        said = named_text(whole[:end])
        seam = f"{begun['id']},{begun.get('created_at', 0)},{len(said)},{end}"
        rest = events(post(chat, path, body, seam, said))
        assert b"".join(whole[:end] + rest) == b"".join(whole)
    if path == RESPONSES:
        assert [document(event)["sequence_number"] for event in whole] == list(range(len(whole)))
    assert chat.idle().in_flight == 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
         "output_config.format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
         "text.format"),
    ],
)  # fmt: skip
def test_a_named_answer_under_a_schema_is_not_continued_unless_nothing_was_said(
    chat: Worker, path: str, fields: dict[str, Any], param: str
) -> None:
    body = named(path, **fields)
    answer = post(chat, path, body, "a,1,1,4", b"{")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "not_resumable", param)
    opening = 2 if path == MESSAGES else 4
    rest = events(post(chat, path, body, f"a,1,0,{opening}"))
    assert json.loads(named_text(rest)) == {}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_only_a_stream_of_named_events_is_continued(chat: Worker, path: str) -> None:
    answer = post(chat, path, named(path, stream=False), "a,1,0,1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-forebay-continue")


def test_text_at_the_seam_is_counted_in_bytes_and_the_stream_keeps_its_name(chat: Worker) -> None:
    said = " naïve 🌊".encode()
    body = stream(CHAT, stream_options={"include_usage": True}, ignore_eos=True)
    chunks = [chunk(event) for event in events(post(chat, CHAT, body, f"abc.d,17,{len(said)}", said))[:-1]]
    assert {(each["id"], each["created"]) for each in chunks} == {("abc.d", 17)}
    assert not any("role" in choice["delta"] for each in chunks for choice in each["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert len([each for each in chunks if each["choices"]]) == 9 + 1, "nine tokens and the end"


@pytest.mark.parametrize(
    ("fields", "resumable"),
    [
        ({}, True),
        ({"frequency_penalty": 1}, True),
        ({"n": 2}, False),
        ({"response_format": FORMAT, "seed": None}, False),
    ],
    ids=str,
)
def test_a_stream_that_cannot_be_resumed_is_marked_for_the_gateway(
    chat: Worker, fields: dict[str, Any], resumable: bool
) -> None:
    for gateway in (True, False):
        headers = {"x-forebay-gateway": "1"} if gateway else {}
        answer = chat.http.post(chat.url + CHAT, json=stream(CHAT, **fields), headers=headers)
        assert answer.headers.get("x-forebay-resumable") == (None if resumable or not gateway else "0")


def test_nothing_is_left_to_say_after_max_tokens(chat: Worker) -> None:
    chunks = events(post(chat, CHAT, stream(CHAT, max_tokens=2), "a,1,6", b" a b c"))
    assert [chunk(each)["choices"][0]["finish_reason"] for each in chunks[:-1]] == ["length"]
    assert chunks[-1] == b"data: [DONE]\n\n"


def test_two_streams_of_one_name_do_not_meet(chat: Worker) -> None:
    body = stream(CHAT)
    with chat.http.stream(
        "POST",
        chat.url + CHAT,
        content=json.dumps(body | {"max_tokens": 4000}),
        headers={"x-forebay-continue": "a,1,0"},
    ) as other:
        lines = other.iter_lines()
        next(lines)
        assert events(post(chat, CHAT, body, "a,1,0"))[-1] == b"data: [DONE]\n\n"
        next(lines)
    chat.idle()


@pytest.mark.parametrize(
    ("path", "changes", "seam", "said"),
    [
        (CHAT, {}, "", b""),
        (CHAT, {}, "a,1", b""),
        (CHAT, {}, "a,1,x", b""),
        (CHAT, {}, "a,1,-1", b""),
        (CHAT, {}, "a b,1,0", b""),
        (CHAT, {}, ",1,0", b""),
        (CHAT, {}, "a,1,0,", b""),
        (CHAT, {}, "a,1,0,x", b""),
        (CHAT, {}, "a,1,0,0,0", b""),
        (CHAT, {}, "a" * 129 + ",1,0", b""),
        (CHAT, {}, "a,1,9999999", b""),
        (CHAT, {}, "a,1,2", b"\xff\xff"),
        (CHAT, {"n": 2}, "a,1,0", b""),
        (CHAT, {"stream": False}, "a,1,0", b""),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "a,1,0", b""),
        (COMPLETIONS, {"echo": True}, "a,1,2", b"Te"),
    ],
)
def test_what_cannot_be_a_seam_is_refused(
    chat: Worker, path: str, changes: dict[str, Any], seam: str, said: bytes
) -> None:
    answer = post(chat, path, stream(path) | changes, seam, said)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "x-forebay-continue")
    assert "x-forebay-retryable" not in answer.headers


def test_a_body_that_ends_too_early_for_its_text_is_no_json(chat: Worker) -> None:
    assert post(chat, CHAT, stream(CHAT), "a,1,3").json()["error"]["code"] == "invalid_json"


def test_an_answer_under_a_schema_ends_in_an_explicit_error_unless_nothing_was_said(chat: Worker) -> None:
    body = stream(CHAT, response_format=FORMAT)
    answer = post(chat, CHAT, body, "a,1,1", b"{")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "not_resumable", "response_format")
    assert "x-forebay-retryable" not in answer.headers
    assert json.loads(text_of(events(post(chat, CHAT, body, "a,1,0"))[:-1])) == {}


def test_embeddings_are_not_continued(tmp_path_factory: pytest.TempPathFactory) -> None:
    with worker(tmp_path_factory.mktemp("embed"), task="embed") as started:
        answer = post(started.ready(), "/v1/embeddings", {"model": "m", "input": "x"}, "a,1,0")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "x-forebay-continue")
