"""The public API of a gateway as an OpenAPI document."""

from functools import cache
from typing import Final

from forebay.core.admission import Band
from forebay.core.errors import TABLE, Code
from forebay.wire import openai_request
from forebay.wire.apis import messages_request, responses_request, tokens
from forebay.wire.errors import MESSAGES, RESPONSES
from forebay.wire.openai_fields import Reader, Shape
from forebay.wire.openapi import answers, inference, tasks
from forebay.wire.openapi.document import EVENTS, JSON, PATH, TEXT, Header, Operation, Parameter, make_document

INSIDE: Final = frozenset({Code.NOT_FOUND, Code.NOT_RESUMABLE, Code.SLOW_CONSUMER, Code.METHOD_NOT_ALLOWED})
"""Error codes that requests of a documented path and method never get."""
INFERENCE: Final = tuple(code for code in TABLE if code not in INSIDE)
IDENTITY: Final = (Code.UNAUTHORIZED,)

_WORD: Final[Shape] = {"type": "string", "minLength": 1}
_NUMBER: Final[Shape] = {"type": "string", "pattern": r"^[0-9]{1,12}(\.[0-9]{1,9})?$"}
_COUNT: Final[Shape] = {"type": "integer", "minimum": 0}
_ID: Final[Shape] = {"type": "string", "pattern": "^[!-~]{1,128}$"}
SECURITY: Final[dict[str, Shape]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
HEADERS: Final = (
    Header("x-request-id", "The request id, for logs and responses; an invalid value is replaced.", _ID),
    Header(
        "x-forebay-priority",
        "The request's priority, as far as the tenant may set it.",
        {"enum": [band.name.lower() for band in Band]},
    ),
    Header(
        "x-forebay-deadline-ms",
        "How long it may wait for a replica, and a stream for its first event, in milliseconds.",
        {"type": "string", "pattern": "^[0-9]{1,9}$"},
    ),
    Header("x-forebay-session", "Requests of one session go to the same replica, if the model is routed so.", _WORD),
    Header("x-forebay-fallback", "Whether a fallback model may be used.", {"enum": ["allow", "deny"]}),
    Header(
        "x-forebay-budget-ms", "How long the caller intends to wait, in milliseconds; for dispatch rules.", _NUMBER
    ),
    Header("x-forebay-max-cost", "The maximum price per million tokens; for dispatch rules.", _NUMBER),
)
"""The headers of an inference request."""
REQUEST_ID: Final = Header("x-request-id", "The name of the request.", _ID)
LIMIT_HEADERS: Final = tuple(
    header
    for what in ("requests", "tokens")
    for header in (
        Header(f"x-ratelimit-limit-{what}", f"The {what} per minute of the tenant, if they are limited.", _COUNT),
        Header(f"x-ratelimit-remaining-{what}", "How many of them this gateway still admits for certain.", _COUNT),
        Header(
            f"x-ratelimit-reset-{what}",
            "When all are available again without further requests, such as `17s`.",
            _WORD,
        ),
    )
)
ANSWER_HEADERS: Final = (
    REQUEST_ID,
    *LIMIT_HEADERS,
    Header("x-forebay-queue-ms", "How long the request waited for a replica.", _COUNT),
    Header("x-forebay-route", "Why it went to this replica.", _WORD),
    Header("x-forebay-replica", "The replica that answers.", _WORD),
    Header("x-forebay-model", "The model that answers.", _WORD),
    Header("x-forebay-model-revision", "Its revision.", _WORD),
    Header(
        "x-forebay-dispatch",
        "Why this model was chosen, if the request names an alias or a fallback was used.",
        _WORD,
    ),
)
ERROR_HEADERS: Final = (
    Header("x-request-id", "The request id, if there is one.", _ID),
    Header("retry-after", "When to retry, in seconds.", _COUNT),
    *LIMIT_HEADERS,
)


def _inference(path: str, id: str, text: str, body: Reader, answer: type, *, streams: bool = True) -> Operation:
    media: dict[str, type | None] = {JSON: answer, EVENTS: answers.ServerSentEvent} if streams else {JSON: answer}
    name = id[:1].upper() + id[1:] + "Request"
    error = answers.MessagesError if path.startswith(MESSAGES) else answers.Error
    return Operation(
        path,
        "post",
        id,
        text,
        {200: media},
        error,
        body,
        name,
        headers=HEADERS,
        answer_headers=ANSWER_HEADERS,
        error_headers=ERROR_HEADERS,
        codes=INFERENCE,
        secured=True,
    )


def _page(path: str, id: str, text: str, said: dict[int, dict[str, type | None]]) -> Operation:
    return Operation(path, "get", id, text, said, answers.Error)


def _models(path: str, id: str, text: str, answer: type, *codes: Code, name: tuple[Parameter, ...] = ()) -> Operation:
    return Operation(
        path,
        "get",
        id,
        text,
        {200: {JSON: answer}},
        answers.Error,
        parameters=name,
        error_headers=ERROR_HEADERS,
        codes=(*IDENTITY, *codes),
        secured=True,
    )


def _task(path: str, id: str, text: str, bodies: tasks.Bodies, said: tasks.Bodies) -> Operation:
    return Operation(
        path,
        "post",
        id,
        text,
        {200: said},
        answers.Error,
        bodies=bodies,
        headers=HEADERS,
        answer_headers=ANSWER_HEADERS,
        error_headers=ERROR_HEADERS,
        codes=INFERENCE,
        secured=True,
    )


_ASK: Final = inference.Maker(
    codes=INFERENCE, statuses=(), headers=HEADERS, answer_headers=ANSWER_HEADERS, error_headers=ERROR_HEADERS,
    secured=True,
)  # fmt: skip
"""The error codes of replicas for the Open Inference Protocol."""
_SAY: Final = inference.Maker(codes=IDENTITY, statuses=(), error_headers=ERROR_HEADERS, secured=True)
"""The error codes of gateways themselves."""
_NAME: Final = Parameter("model", "path", "The name of a model or an alias.", _WORD)
OPERATIONS: Final = (
    _inference(
        "/v1/chat/completions",
        "chatCompletion",
        "Answer a conversation. A stream is events of `data: ` and a chunk, ended by `data: [DONE]`.",
        openai_request.CHAT_BODY,
        answers.ChatCompletion,
    ),
    _inference(
        "/v1/completions",
        "completion",
        "Complete a text. A stream is events of `data: ` and a chunk, ended by `data: [DONE]`.",
        openai_request.COMPLETION_BODY,
        answers.Completion,
    ),
    _inference(
        "/v1/embeddings",
        "embeddings",
        "Make vectors of texts.",
        openai_request.EMBEDDINGS_BODY,
        answers.Embeddings,
        streams=False,
    ),
    _inference(
        MESSAGES,
        "message",
        "Answer a conversation, as Anthropic's API does. A stream is its events, the last one `message_stop`.",
        messages_request.MESSAGES_BODY,
        answers.Message,
    ),
    _inference(
        f"{MESSAGES}/count_tokens",
        "countTokens",
        "Count the tokens that a message would have as its input.",
        messages_request.COUNT_BODY,
        answers.InputTokens,
        streams=False,
    ),
    _inference(
        RESPONSES,
        "response",
        "Answer a conversation, without state. A stream is events, the last one with the whole response.",
        responses_request.RESPONSES_BODY,
        answers.Response,
    ),
    _inference(
        "/v1/tokenize",
        "tokenize",
        "Cut a text into tokens.",
        tokens.TOKENIZE_BODY,
        answers.Tokens,
        streams=False,
    ),
    _inference(
        "/v1/detokenize",
        "detokenize",
        "Put tokens together.",
        tokens.DETOKENIZE_BODY,
        answers.Detokenized,
        streams=False,
    ),
    *(_task(path, *told) for path, told in tasks.TASKS.items()),
    *inference.of_server(_SAY),
    *inference.of_models(_ASK, _ASK),
    _page("/v2/health/live", "inferenceLive", "Whether the process runs.", {200: {}}),
    _page("/v2/health/ready", "inferenceReady", "Whether every model can be served.", {200: {}, 503: {}}),
    _models("/v1/models", "listModels", "The names that the caller may give.", answers.ModelList),
    _models("/v1/models/{model}", "showModel", "One such name.", answers.Model, Code.MODEL_NOT_FOUND, name=(_NAME,)),
    _page("/livez", "livez", "Whether the process runs.", {200: {TEXT: None}}),
    _page(
        "/readyz",
        "readyz",
        "Whether every model can be served.",
        {200: {JSON: answers.Readiness}, 503: {JSON: answers.Readiness}},
    ),
    Operation(
        "/metrics",
        "get",
        "metrics",
        "Metrics of all gateway processes, in Prometheus' text format. On the gateway's machine no key is needed.",
        {200: {TEXT: None}},
        answers.Error,
        error_headers=ERROR_HEADERS,
        codes=(*IDENTITY, Code.MODEL_NOT_ALLOWED),
        secured=True,
    ),
    _page(PATH, "openapi", "This document.", {200: {JSON: dict}}),
)


@cache
def document(version: str, *, keys: bool) -> bytes:
    """The document as JSON; `keys`: whether API keys are required."""
    return make_document(
        "Forebay",
        "Models behind one API. Unknown fields are rejected; null stands for a field left out.",
        version,
        OPERATIONS,
        SECURITY if keys else None,
    )
