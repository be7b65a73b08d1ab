"""What can be wrong with a document that came from elsewhere: a request, another process, a file."""

import re
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the wanted JSON or MessagePack. The last is for nesting that is too
deep, even in a field that nobody asked for."""

_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def unreadable(body: bytes, error: Exception) -> str:
    """What is wrong with a document; msgspec calls one truncated in which half of a surrogate pair ends a string."""
    text = str(error)
    half = _HALF.search(body) if "truncated" in text else None
    return text if half is None else f"{half[0].decode()} is half of a surrogate pair (byte {half.start()})"
