"""Serialises HTTP/1.1 heads, chunks and requests. Parsing is done by httptools."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

Header = tuple[bytes, bytes]
Headers = Sequence[Header]

STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
TEXT: tuple[bytes, bytes] = (b"content-type", b"text/plain; charset=utf-8")
LAST_CHUNK: Final = b"0\r\n\r\n"
CRLF: Final = b"\r\n"
_ABSOLUTE: Final = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_SIZES: Final = 1024
_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(_SIZES)]
"""The size lines of chunks as small as most events: looking one up is faster than formatting it."""
_LONE_LINES: Final = [b"" for _ in range(_SIZES + 8)]
"""The size lines by the length of the whole chunk; empty for lengths that no chunk has."""
for _size, _line in enumerate(_SIZE_LINES[1:], 1):
    _LONE_LINES[len(_line) + _size + len(CRLF)] = _line


def origin_form(target: bytes) -> bytes:
    """The path and query of a target in absolute form, as sent to proxies; other targets unchanged."""
    absolute = None if target.startswith(b"/") else _ABSOLUTE.match(target)
    if absolute is None:
        return target
    path = target[absolute.end() :]
    return path if path.startswith(b"/") else b"/" + path


def authority(host: str, port: int) -> str:
    """Host and port as in a URL: IPv6 addresses in brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def status_line(status: int) -> bytes:
    """The first line of a response; statuses without a registered phrase get an empty one."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def fields(headers: Headers) -> bytes:
    """Header lines, without the empty line that ends a head."""
    return b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. Empty data gives no chunk: an empty chunk would end the body."""
    size = len(data)
    if size >= _SIZES:
        return b"%x\r\n%b\r\n" % (size, data)
    return _SIZE_LINES[size] + data + CRLF if size else data


def lone_chunk(data: bytes) -> bytes:
    """The content of a chunk, if the data is exactly one small chunk in its usual format; otherwise empty."""
    size = len(data)
    line = _LONE_LINES[size] if size < len(_LONE_LINES) else b""
    if line and data.startswith(line) and data.endswith(CRLF):
        return data[len(line) : -2]
    return b""


def last_chunk(trailers: Headers) -> bytes:
    """The end of a chunked body, with trailers."""
    return b"0\r\n%b\r\n" % fields(trailers) if trailers else LAST_CHUNK


def request(method: bytes, target: bytes, headers: Headers, body: bytes = b"") -> bytes:
    """A complete request. `headers` must include `host`; `content-length` is added."""
    return b"%b %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (method, target, fields(headers), len(body), body)
