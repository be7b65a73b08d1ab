"""OpenAI request bodies: what is accepted and what is rejected, with the field's name."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from forebay.core.errors import Code, Refusal
from forebay.wire import openai_request as wire

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
EMBEDDINGS: dict[str, Any] = {"model": "m", "input": "hi"}
PARSERS = {
    "chat": (wire.parse_chat, CHAT, wire._CHAT),
    "completion": (wire.parse_completion, COMPLETION, wire._COMPLETION),
    "embeddings": (wire.parse_embeddings, EMBEDDINGS, wire._EMBEDDINGS),
}


def chat(**fields: Any) -> wire.ChatRequest:
    return wire.parse_chat(msgspec.json.encode(CHAT | fields))


def completion(**fields: Any) -> wire.CompletionRequest:
    return wire.parse_completion(msgspec.json.encode(COMPLETION | fields))


def embeddings(**fields: Any) -> wire.EmbeddingsRequest:
    return wire.parse_embeddings(msgspec.json.encode(EMBEDDINGS | fields))


def refusal(call: Any, /, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(**fields)
    return caught.value


def attempt(parse: Callable[[bytes], object], document: dict[str, Any]) -> Refusal | None:
    """The refusal, if there is one; any other exception fails the test."""
    try:
        parse(json.dumps(document).encode())
    except Refusal as error:
        return error
    return None


def test_a_chat_request_with_every_supported_field_is_read() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "Eve",
            },
            {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "tool_calls": []},
        ],
        max_completion_tokens=7,
        max_tokens=7,
        n=3,
        stop="END",
        seed=-5,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=5,
        frequency_penalty=-2,
        presence_penalty=2,
        response_format={"type": "json_object"},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Eve"},
        {"role": "assistant", "content": "c"},
    )
    assert request.sampling == wire.SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        repetition_penalty=1.1,
        seed=-5,
        stop=("END",),
        ignore_eos=True,
        logprobs=5,
        schema='{"type":"object"}',
    )
    assert (request.n, request.stream, request.include_usage) == (3, True, True)
    assert [capability for capability, _ in wire.needs(request)] == [
        "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p", "ignore_eos",
        "logprobs", "top_logprobs", "json_schema",
    ]  # fmt: skip


@pytest.mark.parametrize("parsed", [{"city": "Rome"}, [1], "a", None])
def test_answer_that_a_client_has_parsed_can_be_sent_back(parsed: Any) -> None:
    """As `client.chat.completions.parse` returns it: with the content as an object."""
    turn = {"role": "assistant", "content": "{}", "refusal": None, "tool_calls": None}
    question = CHAT["messages"][0]
    assert chat(messages=[question, {**turn, "parsed": parsed}, question]) == chat(
        messages=[question, turn, question]
    )


def test_plain_request_requires_no_engine_features() -> None:
    for request in (
        chat(temperature=0.3, top_p=1, max_tokens=5, stop=["x"], repetition_penalty=1.0, top_k=-1, min_p=0, n=8),
        completion(frequency_penalty=0, presence_penalty=0.0, ignore_eos=False, top_k=0),
    ):
        assert list(wire.needs(request)) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {}}, {"n": 1}, {"tools": []}, {"tool_choice": "none"}, {"store": False},
        {"modalities": ["text"]}, {"user": "u"}, {"metadata": {"a": "b"}}, {"safety_identifier": "s"},
        {"prompt_cache_key": "k"},
        {"service_tier": "auto"}, {"parallel_tool_calls": True}, {"functions": []}, {"function_call": "none"},
        {"verbosity": "medium"}, {"reasoning_effort": "none"}, {"prompt_cache_retention": "in_memory"},
        {"stop": []}, {"stop": None}, {"response_format": {"type": "text"}}, {"logprobs": False},
        {"stream": False}, {"max_tokens": None}, {"tools": None}, {"audio": None},
    ],
)  # fmt: skip
def test_value_without_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
    ],
)  # fmt: skip
def test_unsupported_parameter_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, param)
    assert param in error.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [CHAT["messages"][0], {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"colour": "red"}, "colour"),
    ],
)  # fmt: skip
def test_invalid_field_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert param in error.text


def test_error_says_what_was_found_and_what_is_allowed() -> None:
    text = refusal(chat, temperature=3).text
    assert text == "Invalid value for 'temperature': expected a number from 0 to 2, found 3 (an integer)."
    assert refusal(chat, colour=1).text == "Unrecognized request argument supplied: colour"
    assert "'hot' (a string)" in refusal(chat, temperature="hot").text


def test_missing_required_field_is_named() -> None:
    for parse, name in (
        (wire.parse_chat, "messages"),
        (wire.parse_completion, "prompt"),
        (wire.parse_embeddings, "input"),
    ):
        error = refusal(parse, body=b'{"model":"m"}')
        assert (error.code, error.param) == (Code.INVALID_REQUEST, name)
        assert refusal(parse, body=b'{"%b":"x"}' % name.encode()).param is not None


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema_reaches_the_engine_unchanged(strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é", 1.5]}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    text = chat(response_format=form).sampling.schema
    assert text is not None
    assert json.loads(text) == schema
    assert text.index('"b"') < text.index('"a"')


def test_schema_with_a_huge_integer_is_unchanged() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
    body += b'"json_schema":{"name":"x","schema":{"maximum":1%b}}}}' % (b"0" * 40)
    assert wire.parse_chat(body).sampling.schema == '{"maximum":1' + "0" * 40 + "}"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_and_inputs_are_texts_or_tokens_single_or_batched(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected
    assert embeddings(input=prompt).inputs == expected


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("", ""), ([], ""), (None, ""), (5, ""), ({}, ""), (["a", ""], "[1]"), (["a", 1], "[1]"), ([1, "a"], "[1]"),
        ([1, -1], "[1]"), ([1, True], "[1]"), ([1, 2**31], "[1]"), ([[1], []], "[1]"), ([[1], "a"], "[1]"),
        ([[1], [2, 1.5]], "[1][1]"), ([[[1]]], "[0][0]"), ([None], "[0]"), ([True], "[0]"),
    ],
)  # fmt: skip
def test_invalid_prompt_or_input_error_names_the_position(value: Any, where: str) -> None:
    assert refusal(completion, prompt=value).param == f"prompt{where}"
    assert refusal(embeddings, input=value).param == f"input{where}"


def test_batch_size_is_bounded() -> None:
    assert len(completion(prompt=["x"] * wire.PROMPTS_MAX).prompts) == wire.PROMPTS_MAX
    assert refusal(completion, prompt=["x"] * (wire.PROMPTS_MAX + 1)).param == "prompt"
    assert len(embeddings(input=["x"] * wire.INPUTS_MAX).inputs) == wire.INPUTS_MAX
    assert refusal(embeddings, input=["x"] * (wire.INPUTS_MAX + 1)).param == "input"
    assert refusal(chat, messages=[CHAT["messages"][0]] * (wire.MESSAGES_MAX + 1)).param == "messages"


def test_completions_specific_validation() -> None:
    assert completion().sampling.max_tokens == 16
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(echo=True).echo
    assert completion(n=2, best_of=2, suffix="").n == 2
    assert refusal(completion, logprobs=6).param == "logprobs"
    for fields, param in (
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
    ):
        error = refusal(completion, **fields)
        assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, param)
    assert [param for _, param in wire.needs(completion(logprobs=2))] == ["logprobs", "logprobs"]


def test_embeddings_specific_validation() -> None:
    request = embeddings(encoding_format="base64", dimensions=64, user="u")
    assert (request.base64, request.dimensions) == (True, 64)
    assert refusal(embeddings, encoding_format="hex").param == "encoding_format"
    assert refusal(embeddings, dimensions=0).param == "dimensions"
    assert refusal(embeddings, messages=[]).param == "messages"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"model":"\xff"}', b'{"model":"\\ud800"}', b'{"model":"\\udc00\\ud800"}', b"[" * 100_000,
        b'{"a":' * 100_000, b'{"temperature":NaN}', b'{"temperature":Infinity}', b'{"temperature":1e999}',
        b'{"seed":1' + b"0" * 5000 + b"}", b'\xef\xbb\xbf{"model":"m"}', b'{"model":"m"} x', b"\x00",
    ],
)  # fmt: skip
def test_non_json_body_is_rejected(body: bytes) -> None:
    for parse, _, _ in PARSERS.values():
        assert refusal(parse, body=body).code is Code.INVALID_JSON


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"5"])
def test_a_body_must_be_an_object(body: bytes) -> None:
    for parse, _, _ in PARSERS.values():
        assert refusal(parse, body=body).code is Code.INVALID_REQUEST


def test_error_text_length_is_bounded() -> None:
    for fields in ({"temperature": "x" * 100_000}, {"x" * 100_000: 1}, {"metadata": {"k" * 64: "v" * 9999}}):
        error = refusal(chat, **fields)
        assert len(error.text) < 400
        assert len(error.param or "") < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", sorted(PARSERS))
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_json_in_any_field_is_accepted_or_rejected_by_name(kind: str, data: st.DataObject) -> None:
    parse, good, fields = PARSERS[kind]
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(JSON)
    error = attempt(parse, good | {name: value})
    if error is not None:
        assert error.code in {Code.INVALID_REQUEST, Code.UNSUPPORTED_PARAMETER}
        assert error.param is not None
        assert error.param.startswith((name, "stream_options", "top_logprobs"))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(JSON, min_size=1, max_size=3), st.dictionaries(st.sampled_from(["role", "content", "name"]), JSON))
def test_any_json_as_messages_is_accepted_or_rejected(messages: list[Any], message: dict[str, Any]) -> None:
    for value in (messages, [message], [CHAT["messages"][0], message | {"role": "user"}]):
        error = attempt(wire.parse_chat, CHAT | {"messages": value})
        assert error is None or (error.param or "").startswith("messages")


@settings(max_examples=examples(300))
@given(st.binary(max_size=200))
def test_any_bytes_are_accepted_or_rejected(body: bytes) -> None:
    for parse, _, _ in PARSERS.values():
        with pytest.raises(Refusal):
            parse(body)
