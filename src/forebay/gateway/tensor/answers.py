"""Interpretation of the head and body of a replica's response, whatever its API."""

from typing import Final

from forebay.core.errors import Code
from forebay.net.client import Header
from forebay.net.replica_protocol import RETRYABLE
from forebay.wire.errors import error_code

CODES: Final = frozenset(code.value for code in Code)


def is_retryable(status: int, headers: list[Header]) -> bool:
    """Whether the replica rejected the request as it is full or shutting down, and did no work."""
    return status == 503 and RETRYABLE in headers


def has_length(headers: list[Header]) -> bool:
    """Whether a response declares its length; one without is streamed, and relayed as it comes."""
    return any(name == b"content-length" for name, _ in headers)


def code_in(body: bytes, default: Code) -> str:
    """The error code in an error object; the default if there is none, or an unknown one."""
    code = error_code(body)
    return code if code in CODES else default.value


def code_of(status: int) -> Code:
    """The code for a status if the response has no error code, as in the Open Inference Protocol."""
    if status == 503:
        return Code.OVERLOADED
    if status == 404:
        return Code.NOT_FOUND
    if status == 504:
        return Code.DEADLINE_EXCEEDED
    return Code.INVALID_REQUEST if status < 500 or status == 501 else Code.INTERNAL
