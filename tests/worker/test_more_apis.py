"""A worker's other APIs through their official clients: Anthropic's Messages, OpenAI's Responses, tokens."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.worker.rig import PATIENCE_S, Worker, worker

pytestmark = pytest.mark.slow
HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("chat"), settings={"step_ms": 1.0}) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("embed"), task="embed") as started:
        yield started.ready()


@pytest.fixture(scope="module")
def client(chat: Worker) -> Iterator[openai.OpenAI]:
    with chat.client() as client:
        yield client


@pytest.fixture(scope="module")
def claude(chat: Worker) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=chat.url, api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def post(on: Worker, path: str, body: Any, **headers: str) -> httpx.Response:
    return on.http.post(on.url + path, content=json.dumps(body).encode(), headers=headers)


def said(client: openai.OpenAI, **fields: Any) -> Any:
    """The same question to the chat endpoint."""
    return client.chat.completions.create(model="m", messages=HI, temperature=0, **fields)


# --- Anthropic's Messages


def test_a_message_says_what_a_chat_completion_says(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = claude.messages.create(model="m", max_tokens=6, messages=HI, extra_body=GREEDY)
    same = said(client, max_tokens=6)
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [
        ("text", same.choices[0].message.content)
    ]
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0)) == same.usage.prompt_tokens
    assert usage.output_tokens == 6
    assert message.id.startswith("msg_")
    assert message._request_id is not None
    assert message._request_id.startswith("req-")


def test_a_stream_of_a_message_adds_up_to_the_message(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 12,
        "messages": HI,
        "system": "Be brief.",
        "extra_body": GREEDY,
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens
    events = list(claude.messages.create(**asked, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    begun = events[0].message.usage
    assert (begun.input_tokens + (begun.cache_read_input_tokens or 0), begun.output_tokens) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0),
        0,
    )
    assert begun.input_tokens > 0
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_stop_sequence_that_ended_a_message_is_named(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 20, "messages": HI, "extra_body": GREEDY}
    full = claude.messages.create(**asked).content[0].text
    stop = full.split()[3]
    cut = claude.messages.create(**asked, stop_sequences=["\u2603", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == full[: full.index(stop)]
    with claude.messages.stream(**asked, stop_sequences=[stop]) as stream:
        assert stream.get_final_message().stop_sequence == stop


def test_a_message_can_have_a_format(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    message = claude.messages.create(
        model="m", max_tokens=50, messages=HI, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert isinstance(json.loads(message.content[0].text)["a"], int)
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "raised", "expected"),
    [
        ({"model": "other"}, anthropic.NotFoundError, ("not_found_error", "model_not_found", "model")),
        ({"tools": [{"name": "f", "input_schema": {}}]}, anthropic.BadRequestError,
         ("invalid_request_error", "unsupported_parameter", "tools")),
        ({"max_tokens": 99_999}, anthropic.BadRequestError,
         ("invalid_request_error", "context_length_exceeded", "max_tokens")),
        ({"messages": [{"role": "user", "content": "x y " * 5000}]}, anthropic.BadRequestError,
         ("invalid_request_error", "context_length_exceeded", "messages")),
        ({"extra_body": {"colour": 1}}, anthropic.BadRequestError,
         ("invalid_request_error", "invalid_request", "colour")),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "sandwich"}}}},
         anthropic.BadRequestError, ("invalid_request_error", "invalid_request", "output_config.format")),
    ],
    ids=str,
)  # fmt: skip
def test_anthropics_client_understands_refusals(
    claude: anthropic.Anthropic,
    fields: dict[str, Any],
    raised: type[anthropic.APIStatusError],
    expected: tuple[str, str, str],
) -> None:
    with pytest.raises(raised) as caught:
        claude.messages.create(**{"model": "m", "max_tokens": 9, "messages": HI} | fields)
    error = caught.value
    assert isinstance(error.body, dict)
    assert (error.type, error.error_code, error.body["error"]["param"]) == expected
    assert error.request_id


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
            "tool_choice": {"type": "auto"},
        },
        {"messages": [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "naïve 🌊"}]},
    ],
    ids=str,
)
def test_the_tokens_of_a_message_are_counted_as_it_will_use_them(
    chat: Worker, claude: anthropic.Anthropic, fields: dict[str, Any]
) -> None:
    asked = {"model": "m", "messages": HI} | fields
    counted = claude.messages.count_tokens(**asked)
    message = claude.messages.create(**asked, max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 1
    same = post(chat, "/v1/messages/count_tokens", asked | {"max_tokens": 1, "stream": True})
    assert same.json() == {"input_tokens": counted.input_tokens}
    assert "x-forebay-usage" not in same.headers


def test_what_is_wrong_with_a_message_is_wrong_for_counting_too(claude: anthropic.Anthropic, embed: Worker) -> None:
    for fields, code in (
        ({"model": "other"}, "model_not_found"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "x y " * 200_000}]}, "context_length_exceeded"),
    ):
        with pytest.raises(anthropic.APIStatusError) as caught:
            claude.messages.count_tokens(**{"model": "m", "messages": HI} | fields)
        assert caught.value.error_code == code
    answer = post(embed, "/v1/messages/count_tokens", {"model": "m", "messages": HI})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")


def test_counts_are_not_continued_nor_are_messages_made_by_an_embedding_model(chat: Worker, embed: Worker) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": True}
    for path in ("/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize"):
        answer = post(chat, path, body, **{"x-forebay-continue": "a,1,0"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-forebay-continue")
    answer = post(embed, "/v1/messages", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
    assert chat.idle().in_flight == 0


def test_a_broken_stream_of_a_message_raises_in_anthropics_client(tmp_path: Any) -> None:
    with worker(tmp_path, settings={"step_ms": 20.0}) as slow:
        url = slow.ready().url
        with (
            anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE_S) as client,
            client.messages.create(model="m", max_tokens=500, messages=HI, stream=True) as stream,
        ):
            next(event for event in stream if event.type == "content_block_delta")
            slow.signal_engine(9)
            with pytest.raises(anthropic.APIStatusError) as caught:
                list(stream)
    assert (caught.value.type, caught.value.error_code) == ("overloaded_error", "engine_failed")


# --- OpenAI's Responses


def test_a_response_says_what_a_chat_completion_says(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="m", input="hi", max_output_tokens=6, temperature=0, metadata={"a": "b"}, store=False
    )
    same = said(client, max_tokens=6)
    assert response.output_text == same.choices[0].message.content
    assert (response.object, response.model, response.status) == ("response", "m", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (same.usage.prompt_tokens, 6)
    assert (response.metadata, response.temperature, response.max_output_tokens) == ({"a": "b"}, 0, 6)
    assert response.id == f"resp_{response.output[0].id.removeprefix('msg_')}"


def test_the_output_of_a_response_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input=HI, instructions="Be brief.", temperature=0)
    assert first.status == "completed"
    turns: list[Any] = [*HI, *(item.model_dump() for item in first.output), {"role": "user", "content": "more"}]
    second = client.responses.create(model="m", input=turns, instructions="Be brief.", temperature=0)
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    same = client.chat.completions.create(model="m", messages=messages, temperature=0)
    assert second.output_text == same.choices[0].message.content


def test_a_stream_of_a_response_adds_up_to_the_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert (events[0].type, last.type) == ("response.created", f"response.{whole.status}")
    assert (last.response.output_text, last.response.usage) == (whole.output_text, whole.usage)
    cut = list(client.responses.create(**asked | {"max_output_tokens": 2}, stream=True))[-1]
    assert (cut.type, cut.response.status) == ("response.incomplete", "incomplete")


def test_a_response_can_have_a_format(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    with client.responses.stream(model="m", input="hi", text={"format": form}) as stream:
        response = stream.until_done().get_final_response()
    assert isinstance(json.loads(response.output_text)["a"], int)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"store": True}, ("unsupported_parameter", "store")),
        ({"previous_response_id": "resp-1"}, ("unsupported_parameter", "previous_response_id")),
        ({"max_output_tokens": 99_999}, ("context_length_exceeded", "max_output_tokens")),
        ({"input": "x y " * 5000}, ("context_length_exceeded", "input")),
        ({"input": "x" * 600_000}, ("context_length_exceeded", "input")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_openais_client_understands_refusals_of_responses(
    client: openai.OpenAI, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "m", "input": "hi"} | fields)
    assert (caught.value.code, caught.value.param) == expected


def test_the_text_of_a_refusal_calls_a_parameter_what_the_request_calls_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input="hi", max_output_tokens=99_999)
    assert caught.value.message.count("`max_output_tokens`") == 2
    assert "`max_tokens`" not in caught.value.message


def test_a_broken_stream_of_a_response_ends_in_an_error_event(tmp_path: Any) -> None:
    events: list[Any] = []

    def listen(client: openai.OpenAI) -> None:
        for event in client.responses.create(model="m", input="hi", max_output_tokens=500, stream=True):
            events.append(event)
            if len(events) == 6:
                slow.signal_engine(9)

    with (
        worker(tmp_path, settings={"step_ms": 20.0}) as slow,
        slow.ready().client() as client,
        pytest.raises(openai.APIError),  # its connection is cut
    ):
        listen(client)
    assert events[-1].type == "error"
    assert (events[-1].code, events[-1].sequence_number) == ("engine_failed", len(events) - 1)


# --- tokens


def test_a_text_becomes_tokens_and_text_again(chat: Worker, embed: Worker) -> None:
    text = "a river runs to town."
    for on in (chat, embed):
        tokens = post(on, "/v1/tokenize", {"model": "m", "prompt": text})
        assert tokens.status_code == 200, tokens.text
        assert tokens.json()["count"] == len(tokens.json()["tokens"]) == 6
        assert tokens.json()["max_model_len"] == 8192
        again = post(on, "/v1/detokenize", {"model": "m", "tokens": tokens.json()["tokens"]})
        assert again.json() == {"prompt": text}
        assert "x-forebay-usage" not in again.headers
        assert on.metric("worker_requests_total", code="ok", endpoint="tokenize") >= 1


def test_the_tokens_of_messages_are_those_of_their_prompt(chat: Worker, client: openai.OpenAI) -> None:
    counted = post(chat, "/v1/tokenize", {"model": "m", "messages": HI, "add_special_tokens": False}).json()["count"]
    assert counted == said(client, max_tokens=1).usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("tokenize", {}, (400, "invalid_request", "prompt")),
        ("tokenize", {"prompt": ""}, (400, "invalid_request", "prompt")),
        ("tokenize", {"prompt": "x", "messages": HI}, (400, "invalid_request", "messages")),
        ("tokenize", {"prompt": "x", "add_special_tokens": 1}, (400, "invalid_request", "add_special_tokens")),
        ("tokenize", {"prompt": "x" * 600_000}, (400, "context_length_exceeded", "prompt")),
        ("tokenize", {"prompt": "x", "model": "other"}, (404, "model_not_found", "model")),
        ("tokenize", {"prompt": "half a character: \ud83d"}, (400, "invalid_json", None)),
        ("detokenize", {}, (400, "invalid_request", "tokens")),
        ("detokenize", {"tokens": []}, (400, "invalid_request", "tokens")),
        ("detokenize", {"tokens": [1, -1]}, (400, "invalid_request", "tokens[1]")),
        ("detokenize", {"tokens": [1, 65_536]}, (400, "invalid_request", "tokens")),
        ("detokenize", {"tokens": [1] * 8193}, (400, "context_length_exceeded", "tokens")),
        ("detokenize", {"tokens": [1], "colour": 1}, (400, "invalid_request", "colour")),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_refusals_of_tokens_name_their_field(
    chat: Worker, path: str, body: dict[str, Any], expected: tuple[int, str, str | None]
) -> None:
    answer = post(chat, f"/v1/{path}", {"model": "m"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == expected
    assert chat.idle().in_flight == 0


def test_an_embedding_model_has_no_messages_to_count(embed: Worker) -> None:
    error = post(embed, "/v1/tokenize", {"model": "m", "messages": HI}).json()["error"]
    assert (error["code"], error["param"]) == ("wrong_task", "model")
