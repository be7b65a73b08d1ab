"""Errors of documents that come from elsewhere: a request, another process, a file."""

import re
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON or MessagePack. The last is for nesting that is too
deep, even in a field that is not read."""

LONG_BYTES: Final = 1 << 20
CONTAINERS_MAX: Final = 100_000
"""Most arrays and objects of a longer JSON body: two million, in 8 MiB, take a second, in which no stream goes on."""
CROWDED: Final = f"The body has more than {CONTAINERS_MAX} arrays and objects."

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Matches from every quote on, also if there is no other one: else it would search on from each quote within."""
_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def crowded(body: bytes) -> bool:
    """Whether reading this JSON would block everything else for too long; brackets in its texts do not count."""
    if len(body) <= LONG_BYTES or _containers(body) <= CONTAINERS_MAX:
        return False
    return _containers(_STRING.sub(b"", body)) > CONTAINERS_MAX


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def unreadable(body: bytes, error: Exception) -> str:
    """What is wrong with a document; msgspec reports half of a surrogate pair at the end of a string as truncated."""
    text = str(error)
    half = _HALF.search(body) if "truncated" in text else None
    return text if half is None else f"{half[0].decode()} is half of a surrogate pair (byte {half.start()})"
