"""What can be wrong with a document that came from elsewhere: a request, another process, a file."""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the wanted JSON or MessagePack. The last is for nesting that is too
deep, even in a field that nobody asked for."""
