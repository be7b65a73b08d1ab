"""Server-sent events of the APIs whose events have names."""

import json
from typing import Any


def events(data: bytes) -> list[dict[str, Any]]:
    """The documents of a stream's events, each of which must be named by its type."""
    found = []
    for each in data.removesuffix(b"\n\n").split(b"\n\n"):
        name, document = each.split(b"\n")
        found.append(json.loads(document.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found
