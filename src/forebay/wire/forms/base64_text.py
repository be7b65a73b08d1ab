"""Files as base64 text."""

import binascii
from typing import Final

_BREAKS: Final = b" \t\r\n"
"""Other characters outside base64's alphabet are rejected."""


def data_of(text: str) -> bytes:
    """The data; lines may be broken, as `base64` in a shell and e-mail programs do. Raises `ValueError`."""
    return binascii.a2b_base64(text.encode("ascii").translate(None, _BREAKS), strict_mode=True)
