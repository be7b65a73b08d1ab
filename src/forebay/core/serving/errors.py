"""Errors of the Open Inference Protocol: a kind, with its HTTP status and gRPC code, and a text."""

from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """Kinds of failure, named as in the protocol's C API and gRPC."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNIMPLEMENTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    """The response would be late. Triton has no deadlines, and its C API no such code."""


HTTP_STATUS: Final = {
    Kind.INTERNAL: 500,
    Kind.NOT_FOUND: 404,
    Kind.UNAVAILABLE: 503,
    Kind.UNSUPPORTED: 501,
    Kind.CANCELLED: 499,
    Kind.DEADLINE_EXCEEDED: 504,
}
"""Every other kind is 400, as in Triton."""


class Refused(Exception):  # noqa: N818 - named after what it causes: an error response
    """The request is answered with an error. `text` may be shown to the client.

    `retry_after_s`: when a retry makes sense; 0: unknown.
    """

    def __init__(self, kind: Kind, text: str, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        """The HTTP status code."""
        return HTTP_STATUS.get(self.kind, 400)
