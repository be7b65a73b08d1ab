"""OpenAI's Responses API: accepted and rejected requests, and responses that the official client can read."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.wire.apis.sse import events

from forebay.core.errors import TABLE, Code, Refusal
from forebay.wire.apis import responses_request as wire
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.openai_answer import Choice, Head, Usage
from forebay.wire.openai_request import SamplingParams

PLAIN: dict[str, Any] = {"model": "m", "input": "hi"}
HEAD = Head("resp-1", 1_700_000_000, 'mo"del', "rev")
WORDS = ["a", "b\n", "é"]
SCHEMA_FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}


def parsed(**fields: Any) -> wire.ResponsesRequest:
    return wire.parse_responses(msgspec.json.encode(PLAIN | fields))


def refusal(**fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parsed(**fields)
    return caught.value


def test_a_request_with_every_supported_field_becomes_a_chat_request() -> None:
    part = {"type": "output_text", "text": "c", "annotations": [], "logprobs": []}
    request = parsed(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "a"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "message", "id": "msg-1", "status": "completed", "role": "assistant", "content": [part, part]},
        ],
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        stream_options={"include_obfuscation": False},
        text={"format": SCHEMA_FORMAT, "verbosity": "medium"},
        metadata={"a": "b"},
        parallel_tool_calls=False,
        tool_choice="none",
        user="u",
    )
    assert request.chat.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c\nc"},
    )
    assert request.chat.sampling == SamplingParams(7, 0.5, 0.9, schema='{"type":"object"}')
    assert (request.chat.model, request.chat.n, request.chat.stream) == ("m", 1, True)
    assert request.echo == {
        "instructions": "be brief",
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "temperature": 0.5,
        "text": {"format": SCHEMA_FORMAT},
        "top_p": 0.9,
        "user": "u",
    }
    assert parsed(text={"format": {"type": "json_object"}}).chat.sampling.schema == '{"type":"object"}'


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False}, {"store": None}, {"background": False}, {"tools": []}, {"tool_choice": "auto"},
        {"include": []}, {"truncation": "disabled"}, {"previous_response_id": None}, {"reasoning": {}},
        {"reasoning": {"effort": "none", "summary": None}}, {"prompt_cache_options": {"ttl": None}},
        {"text": {}}, {"text": {"format": {"type": "text"}}}, {"text": None}, {"service_tier": "auto"},
        {"parallel_tool_calls": True}, {"max_tool_calls": 3}, {"top_logprobs": 0}, {"metadata": {}},
        {"prompt_cache_key": "k"}, {"safety_identifier": "s"}, {"input": [{"role": "user", "content": "hi"}]},
    ],
    ids=str,
)  # fmt: skip
def test_value_without_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert parsed(**fields) == parsed()


@pytest.mark.parametrize("value", [{"city": "Rome"}, [1], "a", None])
def test_answer_that_a_client_has_parsed_can_be_sent_back(value: Any) -> None:
    part = {"type": "output_text", "text": '{"city": "Rome"}', "annotations": [], "logprobs": []}
    answers = [
        {"type": "message", "role": "assistant", "content": [each]} for each in (part, {**part, "parsed": value})
    ]
    assert parsed(input=answers[1:]) == parsed(input=answers[:1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"conversation": "conv-1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "none", "summary": "auto"}}, "reasoning.summary"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
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
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "sound", "text": "x"}]}]}, "input[0].content[0].type"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": SCHEMA_FORMAT | {"name": "a b"}}}, "text.format.name"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"colour": "red"}, "colour"),
    ],
    ids=str,
)
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
    texts = ("model", "input", "instructions", "user", "safety_identifier", "prompt_cache_key")
    if isinstance(value, str) and field in texts:
        return
    assert (refusal(**{field: value}).param or "").startswith(field)


@pytest.mark.parametrize("name", ["model", "input"])
def test_missing_required_field_is_named(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        wire.parse_responses(msgspec.json.encode({key: value for key, value in PLAIN.items() if key != name}))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, name)


def voice() -> ResponsesAnswer:
    return ResponsesAnswer(HEAD, "msg-1", parsed(metadata={"a": "b"}).echo)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_plain_and_streamed_response_fit_the_official_client(reason: str, status: str) -> None:
    from openai.types.responses import Response, ResponseStreamEvent  # takes seconds: not while tests are collected

    usage, text = Usage(5, 7, 3), 'a"\n\u2028éb'
    body = voice().whole([Choice(text, reason)], usage)
    whole = Response.model_validate_json(body)
    assert (whole.id, whole.model, whole.status, whole.output_text) == ("resp-1", 'mo"del', status, text)
    assert (whole.metadata, whole.error) == ({"a": "b"}, None)
    assert (whole.incomplete_details is None) is (status == "completed")
    assert whole.usage is not None
    assert (whole.usage.input_tokens_details.cached_tokens, whole.usage.total_tokens) == (3, 12)

    told = voice()
    data = told.opening(0) + told.delta(0, text[:-1]) + told.delta(0, text[-1])
    stream = events(data + told.finish(0, reason, None) + told.end(usage))
    kinds: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in stream:
        kinds.validate_python(event)
    assert [event["type"].removeprefix("response.") for event in stream] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", status,
    ]  # fmt: skip
    assert [event["sequence_number"] for event in stream] == list(range(10))
    assert stream[0]["response"]["output"] == []
    assert stream[0]["response"]["usage"] is None
    assert stream[6]["text"] == stream[4]["delta"] + stream[5]["delta"] == text
    assert stream[-1]["response"] == json.loads(body)


def test_error_event_has_its_sequence_number() -> None:
    told = voice()
    told.opening(0)
    (event,) = events(told.error(Code.ENGINE_FAILED, ""))
    assert event == {
        "type": "error",
        "code": "engine_failed",
        "message": TABLE[Code.ENGINE_FAILED].text,
        "param": None,
        "sequence_number": 4,
    }


def test_resumed_stream_is_the_rest_of_the_whole_stream() -> None:
    def told(said: list[str], sent: int) -> list[dict[str, Any]]:
        voice = ResponsesAnswer(HEAD, "msg-1", {}, "".join(said), sent)
        texts = voice.opening(0) + b"".join(voice.delta(0, word) for word in WORDS[len(said) :])
        return events(texts + voice.finish(0, "stop", None) + voice.end(Usage(5, 7)))

    whole = told([], 0)
    for sent in range(1, 4 + len(WORDS)):
        assert told(WORDS[: max(0, sent - 4)], sent) == whole[sent:]
