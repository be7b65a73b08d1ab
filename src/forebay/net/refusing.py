"""What is not read: heads with flaws, bodies for which there is no room. And the answer to that."""

from collections.abc import Sequence
from typing import Final

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import Limits
from forebay.wire import http1
from forebay.wire.errors import error_body, id_headers

BACK_IN_S: Final = 1
"""When a client may come back that has been turned away for want of room."""
SMALL_BODY_BYTES: Final = 65_536
"""Such bodies are read whatever else is: their memory is bounded by the number of connections."""
LINE_BYTES: Final = 4096
"""So much of a request line is looked at."""
RETRYABLE: Final = (b"x-forebay-retryable", b"1")
"""Tells a gateway that another replica may be asked."""


class Stop(Exception):  # noqa: N818 - control flow, never an error
    """Ends a parser run from inside a callback."""


def head_flaw(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> Refusal | None:
    """Why a head is not taken; None: it is. Header names are lower-case."""
    if len(headers) > limits.headers_max:
        return Refusal(Code.HEADERS_TOO_LARGE, f"More than {limits.headers_max} header fields.")
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > limits.header_bytes_max:
        return Refusal(Code.HEADERS_TOO_LARGE)
    names = [name for name, _ in headers]
    if names.count(b"host") > 1 or names.count(b"transfer-encoding") > 1:
        return Refusal(Code.BAD_HTTP, "Host or Transfer-Encoding is given more than once.")
    return None


def target_in(data: bytes) -> bytes:
    """The target in a request line that the parser did not take, for its method, say; empty: there is none."""
    words = data[:LINE_BYTES].split(b"\r\n", 1)[0].split(b" ")
    return words[1] if len(words) == 3 and words[1].startswith(b"/") else b""


def refusal_answer(refusal: Refusal, target: bytes, date: bytes, request_id: bytes = b"") -> bytes:
    """The whole answer, after which the connection closes, in the words of the API that `target` belongs to."""
    path = target.partition(b"?")[0].decode("latin-1")
    body = error_body(refusal, path)
    headers = [http1.JSON, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    if request_id:
        headers += id_headers(request_id, path)
    if refusal.code is Code.BODIES_LIMIT:
        headers += [(b"retry-after", b"%d" % BACK_IN_S), RETRYABLE]
    return b"%b%b%b\r\n%b" % (http1.status_line(TABLE[refusal.code].status), date, http1.fields(headers), body)
