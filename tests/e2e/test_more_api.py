"""The Responses, Messages and tokenization APIs with real models, through their official clients."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from tests.e2e.cluster import Cluster

QUESTION = "What is the capital of France? Answer in one sentence."
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def claude(demo: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(demo: Cluster, path: str, **body: Any) -> httpx.Response:
    return httpx.post(demo.url + path, json=body, timeout=60)


def test_message_is_correct_plain_and_streamed(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "chat", "max_tokens": 40, "messages": ASKED, "extra_body": GREEDY}
    message = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()

    assert "Paris" in message.content[0].text
    assert message.stop_reason == "end_turn"
    assert text == final.content[0].text == message.content[0].text
    assert final.usage.output_tokens == message.usage.output_tokens > 3
    assert message._request_id


def test_models_are_listed_to_both_clients(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    listed = list(claude.models.list())
    assert [model.id for model in listed] == [model.id for model in client.models.list()]
    assert {model.type for model in listed} == {"model"}
    one = claude.models.retrieve("chat")
    assert (one.display_name, one.created_at.timestamp()) == ("chat", client.models.retrieve("chat").created)


def test_message_reports_the_stop_sequence_that_ended_it(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model="chat", max_tokens=40, messages=ASKED, stop_sequences=["\u2603", " Paris"], extra_body=GREEDY
    )

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris")
    assert "Paris" not in message.content[0].text


def test_gateway_and_worker_errors_reach_the_anthropic_client(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="nobody", max_tokens=4, messages=ASKED)
    with pytest.raises(anthropic.BadRequestError) as tools:
        claude.messages.create(
            model="chat", max_tokens=4, messages=ASKED, tools=[{"name": "f", "input_schema": {"type": "object"}}]
        )

    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    assert (tools.value.type, tools.value.error_code) == ("invalid_request_error", "unsupported_parameter")
    assert unknown.value.request_id
    assert tools.value.request_id


def test_response_is_correct_plain_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "chat", "input": QUESTION, "max_output_tokens": 40, "temperature": 0}
    response = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        final = stream.until_done().get_final_response()

    assert "Paris" in response.output_text
    assert response.status == "completed"
    assert final.output_text == response.output_text
    assert response.usage is not None
    assert final.usage is not None
    assert final.usage.output_tokens == response.usage.output_tokens


def test_responses_and_messages_follow_a_json_schema(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    prompt = "Give the capital of France as JSON."
    form: Any = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    response = client.responses.create(
        model="chat", input=prompt, text={"format": form}, temperature=0, max_output_tokens=60
    )
    message = claude.messages.create(
        model="chat",
        max_tokens=60,
        messages=[{"role": "user", "content": prompt}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        extra_body=GREEDY,
    )

    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)


@pytest.mark.parametrize("model", ["chat", "embed"])
def test_detokenized_tokens_give_the_original_text(demo: Cluster, model: str) -> None:
    text = "the river fills the pool"
    tokens = post(demo, "/v1/tokenize", model=model, prompt=text, add_special_tokens=False).json()
    again = post(demo, "/v1/detokenize", model=model, tokens=tokens["tokens"]).json()

    assert again == {"prompt": text}
    assert tokens["count"] == len(tokens["tokens"]) > 3
    assert tokens["max_model_len"] == {"chat": 8192, "embed": 512}[model]


def test_count_tokens_matches_the_usage_of_a_request(demo: Cluster, client: openai.OpenAI) -> None:
    tokens = post(demo, "/v1/tokenize", model="chat", messages=ASKED).json()
    usage = client.chat.completions.create(model="chat", messages=ASKED, max_tokens=1).usage

    assert usage is not None
    assert tokens["count"] == usage.prompt_tokens
