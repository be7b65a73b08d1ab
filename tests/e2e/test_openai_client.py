"""The official `openai` client, unmodified, against the demo cluster and its real models."""

import base64
import json
import math
from typing import Any

import jsonschema
import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_chat_answer_is_correct_and_reports_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=QUESTION, temperature=0, max_tokens=40)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 30


def test_stream_has_the_same_text_as_a_plain_answer(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="chat", messages=QUESTION, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model="chat",
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3


def test_text_completions_work_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="chat", prompt="The capital of France is", temperature=0, max_tokens=8)
    stream = client.completions.create(
        model="chat", prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )

    assert "".join(c.choices[0].text for c in stream) == plain.choices[0].text
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 8


def test_n_returns_as_many_choices_in_order(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=QUESTION, n=3, max_tokens=6, seed=7)
    stream = client.chat.completions.create(model="chat", messages=QUESTION, n=2, max_tokens=6, stream=True)
    seen = {c.choices[0].index for c in stream if c.choices}

    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert seen == {0, 1}


def test_stop_string_ends_the_answer_and_is_excluded(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=QUESTION, temperature=0, max_tokens=40, stop=[" Paris"]
    )

    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" not in (answer.choices[0].message.content or "")


def test_max_completion_tokens_is_exact(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Count from 1 to 100."}],
        temperature=0,  # a drawn answer may end before
        max_completion_tokens=11,
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 11


def test_sampling_parameters_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat",
        messages=QUESTION,
        temperature=0.8,
        top_p=0.9,
        seed=11,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        max_tokens=12,
    )

    assert answer.choices[0].message.content


def test_logprobs_are_returned_for_every_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert all(token.logprob <= 0 for token in logprobs.content)
    assert "".join(t.token for t in logprobs.content) == answer.choices[0].message.content


def test_json_object_and_json_schema_answers_are_valid(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "population": {"type": "integer"}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    structured = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Give Paris as JSON with city and population."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=80,
    )
    loose = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": 'Answer with the JSON object {"ok": true} and nothing else.'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )

    jsonschema.validate(json.loads(structured.choices[0].message.content or ""), schema)
    if loose.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(loose.choices[0].message.content or ""), dict)
    assert (loose.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"42": 5}}, "logit_bias"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
            "tools",
        ),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(
    client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=4, **extra)

    assert caught.value.param == param
    assert param in str(caught.value)


def test_similar_texts_have_close_embeddings(client: openai.OpenAI) -> None:
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "A cheetah is running behind its prey."]
    vectors = [d.embedding for d in client.embeddings.create(model="embed", input=texts).data]

    assert len(vectors[0]) == 384
    assert cosine(vectors[0], vectors[1]) == pytest.approx(0.836, abs=0.02)
    assert cosine(vectors[0], vectors[2]) == pytest.approx(0.474, abs=0.04)


def test_float_and_base64_embeddings_are_equal(client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="embed", input="hello", encoding_format="float")
    packed = client.embeddings.create(model="embed", input="hello", encoding_format="base64")
    raw: Any = packed.data[0].embedding
    assert len(base64.b64decode(raw)) == 4 * 384
    assert floats.usage.prompt_tokens == packed.usage.prompt_tokens == 3


def test_token_array_embedding_equals_that_of_its_text(client: openai.OpenAI) -> None:
    text = client.embeddings.create(model="embed", input="hello").data[0].embedding
    tokens = client.embeddings.create(model="embed", input=[[101, 7592, 102]]).data[0].embedding

    assert cosine(text, tokens) > 0.999


def test_unsupported_embedding_dimensions_are_rejected(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="384") as caught:
        client.embeddings.create(model="embed", input="hello", dimensions=128)

    assert caught.value.param == "dimensions"


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert sorted(m.id for m in client.models.list()) == ["chat", "embed"]
    assert client.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_unknown_model_and_wrong_task_have_clear_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="embed"):
        client.chat.completions.create(model="embed", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="chat"):
        client.embeddings.create(model="chat", input="hello")


def test_context_length_error_names_both_lengths(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192") as caught:
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "word " * 9000}])

    assert caught.value.code == "context_length_exceeded"
