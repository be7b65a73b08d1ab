"""Errors of documents that come from elsewhere: a request, another process, a file."""

import re
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON or MessagePack. The last is for nesting that is too
deep, even in a field that is not read."""

_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def unreadable(body: bytes, error: Exception) -> str:
    """What is wrong with a document; msgspec reports half of a surrogate pair at the end of a string as truncated."""
    text = str(error)
    half = _HALF.search(body) if "truncated" in text else None
    return text if half is None else f"{half[0].decode()} is half of a surrogate pair (byte {half.start()})"
