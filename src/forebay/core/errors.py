"""The closed table of errors: one row gives the HTTP status, who is to blame, and whether the request may be retried.

A failure is mapped to a `Code` once, where it enters our code; every response, metric, log line and document uses the
same row.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

OK: Final = "ok"
CLIENT_CLOSED: Final = "client_closed"
"""Outcomes of requests that do not end with an error: in metrics and records they take the place of a `Code`."""


class Blame(StrEnum):
    """Whose fault an error is; breakers and SLOs count only MODEL and PLATFORM."""

    CLIENT = "client"
    MODEL = "model"
    PLATFORM = "platform"


class Code(StrEnum):
    """Stable error code: the `code` field of an error object and the `code` label of metrics."""

    INVALID_JSON = "invalid_json"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    WRONG_TASK = "wrong_task"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BAD_HTTP = "bad_http"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    UNAUTHORIZED = "invalid_api_key"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    ROLE_NOT_ALLOWED = "role_not_allowed"
    CONFLICT = "conflict"
    STORE_UNAVAILABLE = "store_unavailable"
    NOT_LEADER = "not_leader"
    RATE_LIMITED = "rate_limit_exceeded"
    STREAMS_LIMIT = "streams_limit"
    BUDGET_EXCEEDED = "insufficient_quota"
    CONNECTION_LIMIT = "connection_limit"
    BODIES_LIMIT = "bodies_limit"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NO_REPLICA = "no_replica"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    FENCED = "fenced"
    OTHER_REPLICA = "other_replica"
    ENGINE_LOADING = "engine_loading"
    ENGINE_FAILED = "engine_failed"
    ENGINE_STALLED = "engine_stalled"
    REQUEST_FAILED = "request_failed"
    REPLICA_LOST = "replica_lost"
    STREAM_INTERRUPTED = "stream_interrupted"
    NOT_RESUMABLE = "not_resumable"
    SLOW_CONSUMER = "slow_consumer"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Row:
    """What an error means. `retry`: another replica may be tried while no byte has been sent to the client."""

    status: int
    blame: Blame
    retry: bool
    kind: str
    text: str


_C, _M, _P = Blame.CLIENT, Blame.MODEL, Blame.PLATFORM
_BAD, _BUSY, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"

TABLE: dict[Code, Row] = {
    Code.INVALID_JSON: Row(400, _C, False, _BAD, "The body is not valid JSON."),
    Code.UNSUPPORTED_ENCODING: Row(
        415, _C, False, _BAD, "The body is compressed; this path accepts only uncompressed bodies."
    ),
    Code.INVALID_REQUEST: Row(400, _C, False, _BAD, "A field of the request has a wrong type or value."),
    Code.UNSUPPORTED_PARAMETER: Row(400, _C, False, _BAD, "The engine of this model cannot honour the parameter."),
    Code.CONTEXT_LENGTH_EXCEEDED: Row(
        400, _C, False, _BAD, "Prompt and requested output do not fit the context window."
    ),
    Code.WRONG_TASK: Row(400, _C, False, _BAD, "The model does not serve this kind of request."),
    Code.MODEL_NOT_FOUND: Row(404, _C, False, _BAD, "No model of that name is configured."),
    Code.NOT_FOUND: Row(404, _C, False, _BAD, "No such path."),
    Code.METHOD_NOT_ALLOWED: Row(405, _C, False, _BAD, "The path does not support this method."),
    Code.BAD_HTTP: Row(400, _C, False, _BAD, "The bytes received are not a valid HTTP/1.1 request."),
    Code.BODY_TOO_LARGE: Row(
        413,
        _C,
        False,
        _BAD,
        "The body is larger than gateway.limits.body_bytes_max (model server: --http-max-input-size).",
    ),
    Code.HEADERS_TOO_LARGE: Row(
        431,
        _C,
        False,
        _BAD,
        "The request head is larger than gateway.limits.header_bytes_max (model server: 32,768 bytes).",
    ),
    Code.REQUEST_TIMEOUT: Row(
        408,
        _C,
        False,
        _BAD,
        "The complete request did not arrive in time: gateway.limits.head_timeout_s or gateway.limits.body_timeout_s "
        "(model server: 10 s or 300 s).",
    ),
    Code.UNAUTHORIZED: Row(401, _C, False, _BAD, "The API key is missing or not valid."),
    Code.MODEL_NOT_ALLOWED: Row(403, _C, False, _BAD, "The tenant of this API key may not use the model."),
    Code.ROLE_NOT_ALLOWED: Row(403, _C, False, _BAD, "The role of this key does not permit this operation."),
    Code.CONFLICT: Row(409, _C, False, _BAD, "The operation conflicts with the current state."),
    Code.STORE_UNAVAILABLE: Row(503, _P, False, _SERVER, "The store cannot be reached; nothing was changed."),
    Code.NOT_LEADER: Row(503, _P, False, _SERVER, "Another control leads the cluster; ask that one."),
    Code.RATE_LIMITED: Row(
        429, _C, False, _BUSY, "The tenant has reached its limit on requests or tokens per minute."
    ),
    Code.STREAMS_LIMIT: Row(429, _C, False, _BUSY, "The tenant has reached its limit on open streams."),
    Code.BUDGET_EXCEEDED: Row(429, _C, False, _BUSY, "The tenant has used up its tokens for the day."),
    Code.CONNECTION_LIMIT: Row(
        503, _P, False, _SERVER, "Too many open connections: gateway.limits.connections_max (model server: 10,000)."
    ),
    Code.BODIES_LIMIT: Row(
        503,
        _P,
        True,
        _SERVER,
        "Too many bytes of large bodies are being read at once: gateway.limits.bodies_bytes_max (model server: "
        "--http-max-bodies-size).",
    ),
    Code.QUEUE_FULL: Row(429, _P, False, _BUSY, "The queue of this model is full."),
    Code.QUEUE_TIMEOUT: Row(503, _P, False, _SERVER, "No replica became free in time."),
    Code.DEADLINE_EXCEEDED: Row(
        504, _P, False, _SERVER, "The answer had not started by the request's deadline, or by its model's SLO."
    ),
    Code.NO_REPLICA: Row(503, _P, False, _SERVER, "No replica of this model is ready."),
    Code.OVERLOADED: Row(503, _P, True, _SERVER, "The replica has no room for another request."),
    Code.DRAINING: Row(503, _P, True, _SERVER, "The replica is shutting down."),
    Code.FENCED: Row(
        503, _P, True, _SERVER, "The replica was cut off from the cluster for too long and is stopping."
    ),
    Code.OTHER_REPLICA: Row(503, _P, True, _SERVER, "Another replica now answers at this address."),
    Code.ENGINE_LOADING: Row(503, _P, True, _SERVER, "The replica is still loading its model."),
    Code.ENGINE_FAILED: Row(503, _M, True, _SERVER, "The engine process died; it is being replaced."),
    Code.ENGINE_STALLED: Row(503, _M, True, _SERVER, "The engine is making no progress; it is being replaced."),
    Code.REQUEST_FAILED: Row(503, _M, True, _SERVER, "The engine failed on this request; it serves others."),
    Code.REPLICA_LOST: Row(502, _M, True, _SERVER, "The replica closed the connection before it answered."),
    Code.STREAM_INTERRUPTED: Row(
        502,
        _M,
        False,
        _SERVER,
        "The replica was lost in the middle of the answer; what was sent is incomplete.",
    ),
    Code.NOT_RESUMABLE: Row(
        409, _P, False, _SERVER, "This replica cannot continue an answer that another replica began."
    ),
    Code.SLOW_CONSUMER: Row(408, _C, False, _BAD, "The client did not read the answer in time."),
    Code.INTERNAL: Row(500, _P, False, _SERVER, "Internal error; search the log for the request id."),
}


class Refusal(Exception):  # noqa: N818 - named after what it causes: an error response
    """The request is answered with an error. `text` may be shown to the client; `param` names the offending field."""

    def __init__(self, code: Code, text: str = "", param: str | None = None) -> None:
        self.code = code
        self.text = text or TABLE[code].text
        self.param = param
        super().__init__(f"{code}: {self.text}")


class Conflict(NamedTuple):
    """A setting that is valid alone but conflicts with another one: its path, its value and what is allowed."""

    path: str
    found: str
    allowed: str
