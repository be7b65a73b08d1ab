"""What the head and the body of a replica's answer say, whatever API it speaks."""

from typing import Final

from forebay.core.errors import Code
from forebay.net.client import Header
from forebay.wire.errors import error_code

CODES: Final = frozenset(code.value for code in Code)


def turned_away(status: int, headers: list[Header]) -> bool:
    """Whether an answer says that the replica is full or about to stop, and has done nothing."""
    return status == 503 and (b"x-forebay-retryable", b"1") in headers


def comes_whole(headers: list[Header]) -> bool:
    """Whether an answer says how long it is; one that does not comes piece by piece, and goes on so."""
    return any(name == b"content-length" for name, _ in headers)


def code_in(body: bytes, default: Code) -> str:
    """The error code of an error object; the default if there is none that we know."""
    code = error_code(body)
    return code if code in CODES else default.value


def code_of(status: int) -> Code:
    """What an answer with this status means that has no error code in it, as those of the protocol have not."""
    if status == 503:
        return Code.OVERLOADED
    if status == 404:
        return Code.NOT_FOUND
    return Code.INVALID_REQUEST if status < 500 or status == 501 else Code.INTERNAL
