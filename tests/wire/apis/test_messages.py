"""Anthropic's Messages API: accepted and rejected requests, and responses that the official client can read."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.wire.apis.sse import events

from forebay.core.errors import TABLE, Code, Refusal
from forebay.wire import errors
from forebay.wire.apis import messages_request as wire
from forebay.wire.apis.messages_answer import MessagesAnswer, count_body
from forebay.wire.openai_answer import Choice, Head, Usage
from forebay.wire.openai_request import ChatRequest, SamplingParams

PLAIN: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
HEAD = Head("msg-1", 1_700_000_000, 'mo"del', "rev")


def parsed(**fields: Any) -> ChatRequest:
    return wire.parse_messages(msgspec.json.encode(PLAIN | fields))


def refusal(**fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parsed(**fields)
    return caught.value


def test_a_request_with_every_supported_field_becomes_a_chat_request() -> None:
    cached = {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral", "ttl": "5m"}, "citations": None}
    schema = {"type": "object"}
    request = parsed(
        system=[{"type": "text", "text": "be"}, cached],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": "e"},
        ],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["x", "y"],
        stream=True,
        metadata={"user_id": "u"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert request.messages == (
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    )
    assert request.sampling == SamplingParams(9, 0.5, 0.9, 4, stop=("x", "y"), schema='{"type":"object"}')
    assert (request.model, request.n, request.stream) == ("m", 1, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []}, {"tool_choice": {"type": "auto"}}, {"thinking": {"type": "disabled"}}, {"metadata": {}},
        {"service_tier": "auto"}, {"speed": "standard"}, {"stream": False}, {"stop_sequences": []},
        {"cache_control": {"type": "ephemeral"}}, {"output_config": {"effort": "high"}}, {"system": None},
        {"temperature": 1}, {"top_p": 1}, {"container": None}, {"mcp_servers": []},
    ],
    ids=str,
)  # fmt: skip
def test_value_without_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert parsed(**fields) == parsed()


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, fields]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"output_config": {"effort": "max"}}, "output_config.effort"),
        (block(type="image", source={}), "messages[0].content[1].type"),
        (block(type="tool_result", tool_use_id="x"), "messages[0].content[1].type"),
        ({"messages": [*PLAIN["messages"], {"role": "assistant", "content": "The best is ("}]}, "messages"),
    ],
    ids=str,
)
def test_unsupported_parameter_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, param)
    assert param in error.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (block(type="text", text="x", colour=1), "messages[0].content[1].colour"),
        (block(type="text", text="x", cache_control={"type": "for ever"}),
         "messages[0].content[1].cache_control.type"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": "x"}}}, "output_config.format.schema"),
        ({"seed": 5}, "seed"),
        ({"colour": "red"}, "colour"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_field_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert param in error.text


@pytest.mark.parametrize("field", sorted(wire._REQUEST))
@given(
    value=st.integers(2**40, 2**60)
    | st.text("☃", min_size=1)
    | st.lists(st.booleans(), min_size=1)
    | st.just({"☃": 1})
)
def test_wrong_type_in_any_field_is_rejected_by_name(field: str, value: Any) -> None:
    if isinstance(value, str) and field in ("model", "system"):
        return
    assert (refusal(**{field: value}).param or "").startswith(field)


def test_token_count_covers_the_prompt_of_the_message() -> None:
    fields = {"system": "be", "messages": [*PLAIN["messages"], *PLAIN["messages"]], "tools": [], "stream": True}
    body = {key: value for key, value in (PLAIN | fields).items() if key != "max_tokens"}
    counted = wire.parse_count(msgspec.json.encode(body))
    assert counted == wire.parse_count(msgspec.json.encode(PLAIN | fields))
    assert (counted.model, counted.content, counted.special) == ("m", parsed(**fields).messages, True)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"colour": 1}, "colour"),
        ({"messages": []}, "messages"),
        ({"model": None}, "model"),
    )
    for bad, param in wrong:
        with pytest.raises(Refusal) as caught:
            wire.parse_count(msgspec.json.encode(body | bad))
        assert caught.value.param == param
    assert msgspec.json.decode(count_body(7)) == {"input_tokens": 7}


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_missing_required_field_is_named(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        wire.parse_messages(msgspec.json.encode({key: value for key, value in PLAIN.items() if key != name}))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, name)


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_plain_and_streamed_response_fit_the_official_client(
    reason: str, stop: str | None, expected: tuple[str, str | None]
) -> None:
    from anthropic.types import Message, RawMessageStreamEvent  # takes seconds: not while tests are collected

    usage = Usage(5, 7, 3)
    whole = Message.model_validate_json(MessagesAnswer(HEAD).whole([Choice("hi", reason, None, stop)], usage))
    assert (whole.id, whole.model, whole.role) == ("msg-1", 'mo"del', "assistant")
    assert (whole.stop_reason, whole.stop_sequence) == expected
    assert [(block.type, block.text) for block in whole.content if block.type == "text"] == [("text", "hi")]
    counts = (whole.usage.input_tokens, whole.usage.cache_read_input_tokens, whole.usage.output_tokens)
    assert counts == (2, 3, 7)

    voice = MessagesAnswer(HEAD)
    data = voice.opening(0) + voice.delta(0, 'a"\n\u2028é') + voice.delta(0, "b")
    stream = events(data + voice.finish(0, reason, stop) + voice.end(usage))
    kinds: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in stream:
        kinds.validate_python(event)
    assert [event["type"] for event in stream] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert stream[0]["message"]["content"] == []
    assert stream[0]["message"]["stop_reason"] is None
    assert stream[2]["delta"] == {"type": "text_delta", "text": 'a"\n\u2028é'}
    assert stream[5]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
    assert stream[5]["usage"] == json.loads(MessagesAnswer(HEAD).whole([Choice("", reason)], usage))["usage"]


def test_resumed_stream_opens_with_the_missing_events() -> None:
    whole = events(MessagesAnswer(HEAD).opening(0))
    for sent in (1, 2, 9):
        opening = MessagesAnswer(HEAD, sent).opening(0)
        assert (events(opening) if opening else []) == whole[sent:]


def test_unknown_cache_usage_is_null() -> None:
    from anthropic.types import Message  # takes seconds: not while tests are collected

    usage = Message.model_validate_json(MessagesAnswer(HEAD).whole([Choice("", "stop")], Usage(5, 7))).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (5, None)


@pytest.mark.parametrize("code", list(Code))
def test_every_error_has_an_anthropic_type_and_a_forebay_code(code: Code) -> None:
    body = json.loads(errors.error_body(Refusal(code, "why", "field"), "/v1/messages"))
    (event,) = events(MessagesAnswer(HEAD).error(code, "why"))
    kind = {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
        405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error", 431: "invalid_request_error", 500: "api_error", 502: "api_error",
        503: "overloaded_error", 504: "timeout_error",
    }[TABLE[code].status]  # fmt: skip
    assert (body["type"], body["error"]["type"], body["error"]["message"]) == ("error", kind, "why")
    assert (body["error"]["code"], body["error"]["details"]["error_code"]) == (code, code)
    assert body["error"]["param"] == "field"
    assert event == body | {"error": body["error"] | {"param": None}}


def test_error_format_and_id_headers_depend_on_the_path() -> None:
    refused = Refusal(Code.NOT_FOUND)
    assert b'"type":"error"' in errors.error_body(refused, "/v1/messages/count_tokens")
    assert errors.error_body(refused, "/v1/chat/completions") == errors.error_body(refused)
    assert errors.id_headers(b"r", "/v1/messages") == [(b"x-request-id", b"r"), (b"request-id", b"r")]
    assert errors.id_headers(b"r", "/v1/responses") == [(b"x-request-id", b"r")]
    assert errors.error_event(Code.STREAM_INTERRUPTED, path="/v1/completions").startswith(b'data: {"error":{')
