"""Rejecting requests before they reach a handler: invalid heads, bodies that exceed the memory limits."""

from collections.abc import Sequence
from typing import Final

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import Limits
from forebay.net.replica_protocol import RETRYABLE
from forebay.wire import http1
from forebay.wire.errors import error_body, id_headers

BACK_IN_S: Final = 1
"""Retry-After of a request rejected for lack of body memory."""
SMALL_BODY_BYTES: Final = 65_536
"""Bodies up to this size are always read: the number of connections bounds their memory."""
LINE_BYTES: Final = 4096
"""How much of a request line is examined."""


class Stop(Exception):  # noqa: N818 - control flow, never an error
    """Stops the parser from inside a callback."""


def head_flaw(target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> Refusal | None:
    """Why a head is rejected; None: it is accepted. Header names are lower-case."""
    if len(headers) > limits.headers_max:
        return Refusal(
            Code.HEADERS_TOO_LARGE, f"More than {limits.headers_max} header fields: gateway.limits.headers_max."
        )
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > limits.header_bytes_max:
        return Refusal(Code.HEADERS_TOO_LARGE)
    names = [name for name, _ in headers]
    if names.count(b"host") > 1 or names.count(b"transfer-encoding") > 1:
        return Refusal(Code.BAD_HTTP, "Host or Transfer-Encoding is given more than once.")
    return None


def target_in(data: bytes) -> bytes:
    """The target of a request line that the parser rejected, for its method for example; empty: none."""
    words = data[:LINE_BYTES].split(b"\r\n", 1)[0].split(b" ")
    return words[1] if len(words) == 3 and words[1].startswith(b"/") else b""


def refusal_answer(refusal: Refusal, target: bytes, lines: bytes, request_id: bytes = b"") -> bytes:
    """The whole response, after which the connection closes, in the error format of the API that `target` belongs
    to. `lines`: header lines to begin with, the date among them."""
    path = target.partition(b"?")[0].decode("latin-1")
    body = error_body(refusal, path)
    headers = [http1.JSON, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    if request_id:
        headers += id_headers(request_id, path)
    if refusal.code is Code.BODIES_LIMIT:
        headers += [(b"retry-after", b"%d" % BACK_IN_S), RETRYABLE]
    return b"%b%b%b\r\n%b" % (http1.status_line(TABLE[refusal.code].status), lines, http1.fields(headers), body)
