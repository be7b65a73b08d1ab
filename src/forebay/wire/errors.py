"""Errors in the format of the API a path belongs to: OpenAI's error object, or Anthropic's for the Messages API.

`path` is that of the request; every path not listed below uses the format of OpenAI's chat completions.
"""

from typing import Any, Final

import msgspec

from forebay.core.errors import TABLE, Code, Refusal
from forebay.wire.documents import UNREADABLE

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
MODELS: Final = "/v1/models"
"""Of both APIs."""
INFERENCE: Final = "/v2"
"""The Open Inference Protocol."""

ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error type by HTTP status; other statuses below 500 are `invalid_request_error`, above `api_error`."""

TEXT_CHARS_MAX: Final = 1024
"""No more of what another process says is passed on."""

_encode = msgspec.json.Encoder().encode


def error_object(code: Code, text: str = "", param: str | None = None) -> dict[str, dict[str, str | None]]:
    """The error object as a value."""
    row = TABLE[code]
    return {"error": {"message": text or row.text, "type": row.kind, "param": param, "code": code.value}}


def error_body(refusal: Refusal, path: str = "") -> bytes:
    """The JSON body of an error response."""
    if path.startswith(MESSAGES):
        return _encode(_anthropic_object(refusal.code, refusal.text, refusal.param))
    if path.startswith(INFERENCE):
        return _encode({"error": refusal.text})
    return _encode(error_object(refusal.code, refusal.text, refusal.param))


def error_event(code: Code, text: str = "", path: str = "", events: int = 0) -> bytes:
    """A server-sent event that ends a stream with an error, after `events` others."""
    if path == MESSAGES:
        return b"event: error\ndata: " + _encode(_anthropic_object(code, text, None)) + b"\n\n"
    if path == RESPONSES:
        said = {"type": "error", "code": code.value, "message": text or TABLE[code].text, "param": None}
        return b"event: error\ndata: " + _encode(said | {"sequence_number": events}) + b"\n\n"
    return b"data: " + _encode(error_object(code, text)) + b"\n\n"


class _Problem(msgspec.Struct):
    code: str = ""
    message: str = ""


class _ErrorObject(msgspec.Struct):
    error: _Problem


def error_code(body: bytes) -> str:
    """The code in an error object; empty if the body is not one."""
    try:
        return msgspec.json.decode(body, type=_ErrorObject).error.code
    except UNREADABLE:
        return ""


def error_text(body: bytes) -> str:
    """What an error object says to people; empty if there is none."""
    try:
        return msgspec.json.decode(body, type=_ErrorObject).error.message[:TEXT_CHARS_MAX]
    except UNREADABLE:
        return ""


def id_headers(request_id: bytes, path: str = "") -> list[tuple[bytes, bytes]]:
    """The response headers with the request id; Anthropic's clients read it from a header of their own."""
    if path.startswith((MESSAGES, MODELS)):
        return [(b"x-request-id", request_id), (b"request-id", request_id)]
    return [(b"x-request-id", request_id)]


def _anthropic_object(code: Code, text: str, param: str | None) -> dict[str, Any]:
    """Our code is included twice: where Anthropic's client looks for it, and where all our errors have it."""
    row = TABLE[code]
    kind = ANTHROPIC_TYPES.get(row.status, "invalid_request_error" if row.status < 500 else "api_error")
    error = {"type": kind, "message": text or row.text, "param": param, "code": code.value}
    return {"type": "error", "error": error | {"details": {"error_code": code.value}}}
