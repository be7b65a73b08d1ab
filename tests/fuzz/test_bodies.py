"""Bodies of requests: a value or a `Refusal`, never anything else, and what is taken is what the document says."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tests.fuzz.corpus import encoded, json_bytes, survives

from forebay.core.errors import Refusal
from forebay.core.model import ModelRoutes, Policy, Task
from forebay.core.routing.speed import Lengths
from forebay.gateway.asking import expected_tokens, routing_of
from forebay.gateway.dispatch.dispatching import renamed
from forebay.wire import openai_request
from forebay.wire.apis import messages_request, responses_request, tokens
from forebay.wire.apis.request_fields import request_fields
from forebay.wire.errors import error_body
from forebay.wire.openai_fields import Reader, decode, shape_of

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PLAIN = {
    "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["x"], "n": 1, "stream": True,
    "stream_options": {"include_usage": True}, "user": "u", "top_k": 5, "min_p": 0.1, "frequency_penalty": 1,
    "presence_penalty": -1, "repetition_penalty": 1.1, "ignore_eos": False, "logit_bias": {},
}  # fmt: skip
CHATS = [
    {"model": "m", "messages": MESSAGES},
    {**PLAIN, "messages": MESSAGES, "metadata": {"a": "b"}, "logprobs": True, "top_logprobs": 2, "tools": []},
    {
        "model": "m",
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
    },
]
COMPLETIONS = [
    {"model": "m", "prompt": "hello", "echo": True},
    {**PLAIN, "prompt": [[1, 2], [3]], "logprobs": 3, "best_of": 1},
    {"model": "m", "prompt": ["a", "b"], "suffix": ""},
]
EMBEDDINGS = [
    {"model": "m", "input": "hello"},
    {"model": "m", "input": [[1], [2, 3]], "encoding_format": "base64", "dimensions": 3},
]
TURNS = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]
MESSAGE = [
    {"model": "m", "max_tokens": 5, "messages": TURNS, "system": [{"type": "text", "text": "s"}]},
    {
        "model": "m",
        "max_tokens": 5,
        "messages": [*TURNS, {"role": "assistant", "content": "a"}, *TURNS],
        "stop_sequences": ["x"],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
    },
]
INPUT = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi", "annotations": []}]}]
RESPONSES = [
    {"model": "m", "input": "hello", "instructions": "be", "store": False},
    {
        "model": "m",
        "input": INPUT,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
    },
]
TOKENIZE = [{"model": "m", "prompt": "x", "add_special_tokens": False}, {"model": "m", "messages": MESSAGES}]
DETOKENIZE = [{"model": "m", "tokens": [1, 2, 3]}]

ERROR_BYTES_MAX = 4096
"""What a refusal may quote of a request is little, whatever the request is."""
Parse = Callable[[bytes], object]
READERS: dict[str, tuple[Parse, Reader, list[Any]]] = {
    "chat": (openai_request.parse_chat, openai_request.CHAT_BODY, CHATS),
    "completion": (openai_request.parse_completion, openai_request.COMPLETION_BODY, COMPLETIONS),
    "embeddings": (openai_request.parse_embeddings, openai_request.EMBEDDINGS_BODY, EMBEDDINGS),
    "messages": (messages_request.parse_messages, messages_request.MESSAGES_BODY, MESSAGE),
    "count": (messages_request.parse_count, messages_request.COUNT_BODY, MESSAGE),
    "responses": (responses_request.parse_responses, responses_request.RESPONSES_BODY, RESPONSES),
    "tokenize": (tokens.parse_tokenize, tokens.TOKENIZE_BODY, TOKENIZE),
    "detokenize": (tokens.parse_detokenize, tokens.DETOKENIZE_BODY, DETOKENIZE),
}
SEEDS = [seed for _, _, seeds in READERS.values() for seed in seeds]
bodies = json_bytes(SEEDS)


@pytest.mark.parametrize("name", READERS)
def test_the_corpus_is_valid(name: str) -> None:
    parse, reader, seeds = READERS[name]
    for seed in seeds:
        assert parse(encoded(seed)) is not None
        Draft202012Validator(shape_of(reader)).validate(seed)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_body_becomes_a_request_or_a_refusal_and_fits_the_document(name: str, data: st.DataObject) -> None:
    parse, reader, seeds = READERS[name]
    body = data.draw(json_bytes(seeds, SEEDS))
    try:
        parse(body)
    except Refusal as error:
        refusal = error
    else:
        Draft202012Validator(shape_of(reader)).validate(decode(body))
        return
    assert len(error_body(refusal)) < ERROR_BYTES_MAX


ROUTES = ModelRoutes("m", Task.CHAT, Policy.CPR, "r", 8, 10.0)


@given(bodies)
def test_the_gateway_reads_of_any_body_what_it_wants_or_refuses_it(body: bytes) -> None:
    request = survives(request_fields, body, Refusal)
    if request is None:
        return
    lengths = Lengths()
    assert 0 < expected_tokens(request, lengths) < float("inf")
    ask = routing_of(request, b"id", routes=ROUTES, lengths=lengths)
    assert ask.tokens > 0
    assert ask.output_tokens >= 0


@given(bodies, st.text(min_size=1, max_size=20).filter(lambda name: re.search("[\ud800-\udfff]", name) is None))
def test_another_model_in_a_body_changes_nothing_else(body: bytes, model: str) -> None:
    request = survives(request_fields, body, Refusal)
    if request is None:
        return
    changed = survives(lambda data: renamed(data, model), body, Refusal)
    if changed is not None:
        assert request_fields(changed).model == model
        before, after = survives(decode, body, Refusal), survives(decode, changed, Refusal)
        if before is not None:
            assert after == {**before, "model": model}
