"""The published OpenAPI documents: they list exactly the routed paths, and real responses conform to them."""

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route
from tests.net.rig import lone

from forebay.control.api.app import ANSWERS, make_app
from forebay.core.admission import Band
from forebay.core.errors import TABLE, Code, Refusal
from forebay.engines.protocol import TokenLogprob
from forebay.gateway import asking, pages
from forebay.gateway.dispatch import dispatching
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.tensor import protocol
from forebay.gateway.tensor import requests as tensor
from forebay.modelserver.serve import DOCUMENT
from forebay.modelserver.tasks.endpoint import MODELS_PATH
from forebay.modelserver.tasks.table import TASKS
from forebay.net.exchange import Exchange
from forebay.wire.apis.messages_answer import MessagesAnswer, count_body
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.apis.responses_request import parse_responses
from forebay.wire.apis.tokens import detokenize_body, tokenize_body
from forebay.wire.errors import error_body
from forebay.wire.oip.route import Endpoint, route
from forebay.wire.openai_answer import (
    ChatAnswer,
    Choice,
    CompletionAnswer,
    Head,
    Usage,
    embedding_item,
    embeddings_body,
)
from forebay.wire.openapi import admin, modelserver, public, tasks

PUBLIC: dict[str, Any] = msgspec.json.decode(public.document("1", keys=True))
ADMIN: dict[str, Any] = msgspec.json.decode(admin.document("1", ANSWERS))
MODELSERVER: dict[str, Any] = msgspec.json.decode(modelserver.document("1"))
BOTH = pytest.mark.parametrize("document", [PUBLIC, ADMIN, MODELSERVER], ids=["public", "admin", "model server"])


def fits(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    """Raise if a value does not fit a schema of the document."""
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def answer(path: str, status: int, body: bytes, method: str = "post") -> None:
    """Raise if a body does not fit what the public document says of it."""
    content = PUBLIC["paths"][path][method]["responses"][str(status)]["content"]
    fits(PUBLIC, content["application/json"]["schema"], msgspec.json.decode(body))


def everything(value: object) -> Iterator[dict[str, Any]]:
    """All objects inside of a value."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from everything(each)
    elif isinstance(value, list):
        for each in value:
            yield from everything(each)


def test_gateway_routes_exactly_the_documented_paths() -> None:
    routed = {(path.decode(), "post") for path in ENDPOINTS.keys() | tensor.PATHS}
    routed |= {(path, "get") for path in pages.GETS} | {(pages.MODELS + "/{model}", "get")}
    # all that there is in the protocol, and what of that a gateway answers
    routed |= {each for each in described(MODELSERVER) if each[0].startswith("/v2") and answered_by_gateways(*each)}

    assert described(PUBLIC) == routed


def described(document: dict[str, Any]) -> set[tuple[str, str]]:
    """Paths and methods."""
    return {(path, method) for path, methods in document["paths"].items() for method in methods}


def asked(path: str, method: str) -> Exchange:
    """A request for a path of a document."""
    target = path.replace("{model}", "m").replace("{version}", "1").replace("{region}", "r")
    return lone(method.upper().encode(), target.encode())


def answered_by_gateways(path: str, method: str) -> bool:
    exchange = asked(path, method)
    if (endpoint := tensor.find(exchange)) is not None:
        return endpoint.method == exchange.method and endpoint.model == "m"  # not a model called stats
    try:
        protocol.answer(exchange, exchange.path, lambda _: {}, ready=True)
    except Refusal:
        return False
    return True


def test_model_server_routes_exactly_the_documented_paths() -> None:
    protocol = {(route(asked(*each).target), each[1]) for each in described(MODELSERVER) if each[0].startswith("/v2")}
    both = {Endpoint.LOGGING, Endpoint.TRACE}
    written = {Endpoint.INFER, Endpoint.GENERATE, Endpoint.GENERATE_STREAM, Endpoint.INDEX, Endpoint.LOAD} | both
    written |= {Endpoint.UNLOAD}
    methods = {each: {"post"} if each in written else {"get"} for each in Endpoint}
    methods |= {each: {"get", "post"} for each in (*both, Endpoint.SYSTEM_MEMORY, Endpoint.CUDA_MEMORY)}
    assert {each: {method for found, method in protocol if found.endpoint is each} for each in Endpoint} == methods
    for each in (Endpoint.MODEL, Endpoint.MODEL_READY, Endpoint.CONFIG, Endpoint.STATISTICS, Endpoint.INFER):
        assert {found.version for found, _ in protocol if found.endpoint is each and found.model} == {"", "1"}
    rest = {each for each in described(MODELSERVER) if not each[0].startswith("/v2")}
    others = {
        (MODELS_PATH, "get"),
        (MODELS_PATH + "/{model}", "get"),
        ("/metrics", "get"),
        (DOCUMENT.decode(), "get"),
    }
    assert rest == {(path, "post") for path in TASKS} | others


@pytest.mark.parametrize("path", sorted(TASKS.keys() - {"/v1/embeddings"}))
def test_task_schemas_match_the_parsers(path: str) -> None:
    wanted = TASKS[path].shape
    for document in (PUBLIC, MODELSERVER):
        for media, content in document["paths"][path]["post"]["requestBody"]["content"].items():
            schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
            file = {"file"} & schema["properties"].keys()
            assert schema["properties"].keys() - file == wanted["properties"].keys()
            assert set(schema["required"]) - file == set(wanted["required"])
            assert bool(file) == (path.startswith("/v1/audio/t") and media == tasks.FORM)


def test_admin_api_routes_exactly_the_documented_paths() -> None:
    app = make_app(cast(Any, None))

    assert {route.path for route in app.routes if isinstance(route, Route)} == set(ADMIN["paths"])


@BOTH
def test_document_is_valid_and_complete(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    targets = {each["$ref"] for each in everything(document) if "$ref" in each}
    operations = [each for methods in document["paths"].values() for each in methods.values()]

    assert targets <= {f"#/components/schemas/{name}" for name in schemas}
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert all("200" in each["responses"] for each in operations)


def test_headers_read_by_the_gateway_are_documented() -> None:
    read = {asking.SESSION, asking.PRIORITY, asking.DEADLINE, b"x-request-id"}
    read |= {dispatching.BUDGET, dispatching.COST, dispatching.FALLBACK}
    for path, methods in PUBLIC["paths"].items():
        if "post" in methods and path != "/v2/repository/index":
            named = {p["name"].encode() for p in methods["post"]["parameters"] if p["in"] == "header"}
            assert named - {b"inference-header-content-length"} == read, path
    bands = next(h.shape["enum"] for h in public.HEADERS if h.name.encode() == asking.PRIORITY)
    assert {band.encode() for band in bands} == set(asking.BANDS)
    assert len(bands) == len(Band)


def test_every_error_of_a_request_is_documented() -> None:
    for path, methods in PUBLIC["paths"].items():
        if "post" not in methods or path == "/v2/repository/index":
            continue
        responses = methods["post"]["responses"]
        for code in set(Code) - public.INSIDE:
            status = str(TABLE[code].status)
            assert f"`{code}`" in responses[status]["description"], (path, code)
            answer(path, TABLE[code].status, error_body(Refusal(code, "text", "field"), path))


def test_document_without_keys_has_no_security_section() -> None:
    open_to_all = msgspec.json.decode(public.document("1", keys=False))

    assert not [each for each in everything(open_to_all) if "security" in each or "securitySchemes" in each]
    assert {name for each in everything(PUBLIC) for name in each.get("security", ()) for name in name} == {
        "bearer",
        "x-api-key",
        "api-key",
    }


HEAD = Head("id-1", 7, "m", "r")
TOKENS = [TokenLogprob("a", -0.5, (97,), (("b", -1.0, (98,)),)), TokenLogprob("c", -0.1, (99,))]
CHOICES = {
    "plain": Choice("text", "stop"),
    "cut": Choice("text", "length"),
    "stop string": Choice("text", "stop", stop="x"),
    "log probabilities": Choice("text", "stop", TOKENS),
}
USAGES = [Usage(3, 4), Usage(3, 4, 2)]


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("usage", USAGES, ids=["unknown cache", "known cache"])
def test_chat_completion_and_message_responses_conform_to_the_document(choice: Choice, usage: Usage) -> None:
    answer("/v1/chat/completions", 200, ChatAnswer(HEAD, 2).whole([choice, choice], usage))
    answer("/v1/completions", 200, CompletionAnswer(HEAD, 1).whole([choice], usage))
    answer("/v1/messages", 200, MessagesAnswer(HEAD).whole([choice], usage))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"instructions": "be", "user": "u", "metadata": {"a": "b"}, "max_output_tokens": 3, "top_p": 0.5},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
    ],
)
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_responses_of_the_responses_api_conform_to_the_document(choice: Choice, more: dict[str, Any]) -> None:
    echo = parse_responses(msgspec.json.encode({"model": "m", "input": "x", **more})).echo
    answer("/v1/responses", 200, ResponsesAnswer(HEAD, "msg-1", echo).whole([choice], USAGES[1]))


def test_embeddings_and_tokens_conform_to_the_document() -> None:
    items = [embedding_item(0, b"[0.5,1]"), embedding_item(1, b'"AAAA"')]
    answer("/v1/embeddings", 200, embeddings_body("m", items, 3))
    answer("/v1/tokenize", 200, tokenize_body((1, 2), 10))
    answer("/v1/detokenize", 200, detokenize_body("text"))
    answer("/v1/messages/count_tokens", 200, count_body(3))
