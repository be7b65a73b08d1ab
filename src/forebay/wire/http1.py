"""HTTP/1.1 heads, chunks and requests as bytes. Parsing is httptools' business."""

from collections.abc import Sequence
from http import HTTPStatus

Header = tuple[bytes, bytes]
Headers = Sequence[Header]

STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
TEXT: tuple[bytes, bytes] = (b"content-type", b"text/plain; charset=utf-8")
LAST_CHUNK = b"0\r\n\r\n"


def status_line(status: int) -> bytes:
    """The first line of an answer; statuses without a registered phrase get an empty one."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def fields(headers: Headers) -> bytes:
    """Header lines, without the empty line that ends a head."""
    return b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. Empty data gives nothing: an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def last_chunk(trailers: Headers) -> bytes:
    """The end of a chunked body."""
    return b"0\r\n%b\r\n" % fields(trailers) if trailers else LAST_CHUNK


def request(method: bytes, target: bytes, headers: Headers, body: bytes = b"") -> bytes:
    """A complete request. `headers` must hold `host`; the length is added."""
    return b"%b %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (method, target, fields(headers), len(body), body)
