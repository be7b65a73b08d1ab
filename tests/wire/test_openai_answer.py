"""OpenAI responses: the official client's own types can read them."""

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from forebay.wire import openai_answer as wire

HEAD = wire.Head("chatcmpl-1", 1_700_000_000, 'mo"del', "rev")


@dataclass
class Token:
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top: tuple[tuple[str, float, tuple[int, ...]], ...] = ()


TOKENS = [
    Token("He", -0.5, (72, 101), (("He", -0.5, (72, 101)), ("A", -math.inf, (65,)))),
    Token("llo", -1.0, (108, 108, 111)),
]


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    document: dict[str, Any] = json.loads(data[6:])
    return document


def test_chat_response_fits_the_official_client() -> None:
    choices = [wire.Choice("hi", "stop", TOKENS), wire.Choice("ho", "length")]
    body = wire.ChatAnswer(HEAD, 2).whole(choices, wire.Usage(5, 7, 3))
    answer = ChatCompletion.model_validate_json(body, strict=True)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "hi", "stop"),
        (1, "ho", "length"),
    ]
    assert json.loads(body)["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "ho", "refusal": None, "annotations": []},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer.usage is not None
    assert answer.usage.total_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs[1].logprob == wire.LOGPROB_MIN
    assert (answer.model, answer.system_fingerprint) == ('mo"del', "rev")


def test_completion_response_fits_the_official_client() -> None:
    voice = wire.CompletionAnswer(HEAD, prefixes=["x" * 10])
    body = voice.whole([wire.Choice("Hello", "stop", TOKENS)], wire.Usage(1, 2))
    answer = Completion.model_validate_json(body, strict=True)
    assert answer.choices[0].text == "xxxxxxxxxxHello"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["He", "llo"], [10, 12])
    assert logprobs.token_logprobs == [-0.5, -1.0]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0]["He"] == -0.5
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is None


@pytest.mark.parametrize("include_usage", [True, False])
def test_chat_stream_fits_the_official_client(include_usage: bool) -> None:
    chunks = wire.ChatAnswer(HEAD, 2, stream=True, include_usage=include_usage)
    stream = [
        chunks.opening(1),
        chunks.delta(1, 'a"\n\u2028é'),
        chunks.delta(1, "b", TOKENS),
        chunks.finish(1, "stop"),
    ]
    documents = [event(data) for data in stream]
    for document in documents:
        ChatCompletionChunk.model_validate(document, strict=True)
        assert ("usage" in document) is include_usage
        assert document["object"] == "chat.completion.chunk"
        assert document["choices"][0]["index"] == 1
    assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert documents[1]["choices"][0]["delta"] == {"content": 'a"\n\u2028é'}
    assert documents[1]["choices"][0]["finish_reason"] is None
    assert documents[2]["choices"][0]["logprobs"]["content"][0]["token"] == "He"
    assert (documents[3]["choices"][0]["delta"], documents[3]["choices"][0]["finish_reason"]) == ({}, "stop")
    end = chunks.end(wire.Usage(1, 2))
    assert end.endswith(wire.DONE)
    assert (end != wire.DONE) is include_usage
    if include_usage:
        last = event(end.removesuffix(wire.DONE))
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3)


def test_tokens_within_a_character_have_its_offset() -> None:
    octets = "é😀!".encode()
    tokens = [Token(bytes([octet]).decode("utf-8", "replace"), -1.0, (octet,)) for octet in octets]
    expected = [0, 0, 1, 1, 1, 1, 2]

    whole = wire.CompletionAnswer(HEAD).whole([wire.Choice("é😀!", "stop", tokens)], wire.Usage(1, 7))
    stream = wire.CompletionAnswer(HEAD, stream=True)
    parts = [event(stream.delta(0, *part)) for part in (("é", tokens[:2]), ("😀!", tokens[2:]))]

    assert json.loads(whole)["choices"][0]["logprobs"]["text_offset"] == expected
    assert [at for part in parts for at in part["choices"][0]["logprobs"]["text_offset"]] == expected


def test_completion_stream_fits_the_official_client() -> None:
    chunks = wire.CompletionAnswer(HEAD, stream=True)
    assert chunks.opening(0) == b""
    documents = [
        event(chunks.delta(0, "x")),
        event(chunks.delta(0, "y", TOKENS)),
        event(chunks.delta(0, "z", TOKENS)),
        event(chunks.finish(0, "length")),
    ]
    for document in documents:
        whole = {"finish_reason": "stop"}  # the client's type has no word for "not yet", its stream parser has
        choice = {k: v for k, v in document["choices"][0].items() if v is not None}
        Completion.model_validate(document | {"choices": [whole | choice]}, strict=True)
        assert document["object"] == "text_completion"
    assert [document["choices"][0]["text"] for document in documents] == ["x", "y", "z", ""]
    assert documents[1]["choices"][0]["logprobs"]["tokens"] == ["He", "llo"]
    assert [d["choices"][0]["logprobs"]["text_offset"] for d in documents[1:3]] == [[0, 2], [5, 7]]
    assert documents[3]["choices"][0]["finish_reason"] == "length"


def test_resumed_stream_does_not_repeat_its_opening() -> None:
    echoed = wire.CompletionAnswer(HEAD, stream=True, prefixes=["ab"])
    assert event(echoed.opening(0))["choices"][0]["text"] == "ab"
    assert wire.CompletionAnswer(HEAD, stream=True, prefixes=["ab"], begun="abc").opening(0) == b""
    assert wire.CompletionAnswer(HEAD, stream=True, prefixes=["ab"], begun="").opening(0) == echoed.opening(0)
    assert wire.ChatAnswer(HEAD, stream=True, begun="").opening(0) == b""


@given(st.text())
def test_any_text_round_trips_through_a_chunk(text: str) -> None:
    chunks = wire.ChatAnswer(HEAD, stream=True, include_usage=True)
    assert event(chunks.delta(0, text))["choices"][0]["delta"]["content"] == text


def test_embeddings_response_fits_the_official_client() -> None:
    items = [wire.embedding_item(0, b"[0.25,-1.5]"), wire.embedding_item(1, b'"AACAPg=="')]
    body = wire.embeddings_body("m", items, 9)
    document = json.loads(body)
    assert document["data"][1] == {"object": "embedding", "index": 1, "embedding": "AACAPg=="}
    answer = CreateEmbeddingResponse.model_validate(document | {"data": document["data"][:1]}, strict=True)
    assert answer.data[0].embedding == [0.25, -1.5]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.object) == (9, 9, "list")
