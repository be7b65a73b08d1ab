"""Finds form fields without parsing the whole form: what a gateway reads from an upload that it forwards.

Only the beginning of each part is examined; the replica parses the whole form.
"""

import re
from typing import Final, NamedTuple

PARTS_MAX: Final = 64
"""How many parts are examined."""
HEAD_BYTES_MAX: Final = 1024
"""Of the header of a part."""
VALUE_BYTES_MAX: Final = 256
"""Of the value of a field; model names are shorter."""
_BOUNDARY: Final = re.compile(rb';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME: Final = re.compile(rb'content-disposition:[^\r\n]*[;\s]name="?([^"\r\n;]+)"?', re.IGNORECASE)


class Place(NamedTuple):
    """Where the value of a field is in a body."""

    start: int
    end: int


def find_fields(content_type: bytes, body: bytes, names: tuple[bytes, ...]) -> dict[bytes, Place]:
    """The places of fields by name, the first of each; fields whose value is too long are left out."""
    found: dict[bytes, Place] = {}
    match = _BOUNDARY.search(content_type)
    if match is None:
        return found
    mark = b"--" + (match[1] or match[2])
    at = body.find(mark)
    for _ in range(PARTS_MAX):
        if at < 0:
            break
        at += len(mark)
        head_end = body.find(b"\r\n\r\n", at, at + HEAD_BYTES_MAX)
        start = head_end + 4
        end = body.find(b"\r\n" + mark, start if head_end >= 0 else at)
        if head_end >= 0 and start <= end <= start + VALUE_BYTES_MAX:
            name = _NAME.search(body, at, head_end)
            if name is not None and name[1] in names:
                found.setdefault(name[1], Place(start, end))
                if len(found) == len(names):
                    break
        at = end + 2 if end >= 0 else -1
    return found
