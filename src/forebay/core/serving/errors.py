"""What the Open Inference Protocol calls an error: a kind, with one HTTP status and one gRPC code, and a text."""

from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """Kinds of failure, by the names that the protocol's C API and gRPC have for them."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNIMPLEMENTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


HTTP_STATUS: Final = {
    Kind.INTERNAL: 500,
    Kind.NOT_FOUND: 404,
    Kind.UNAVAILABLE: 503,
    Kind.UNSUPPORTED: 501,
    Kind.CANCELLED: 499,
}
"""Every other kind is 400, as Triton answers."""


class Refused(Exception):  # noqa: N818 - the product's word for an answer that is an error
    """A request of the protocol is answered with an error. `text` is safe to show.

    `retry_after_s`: when it makes sense to come back; 0: that is not known.
    """

    def __init__(self, kind: Kind, text: str, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        """What HTTP clients get."""
        return HTTP_STATUS.get(self.kind, 400)
