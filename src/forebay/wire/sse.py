"""Server-sent events on their way through: cut at event boundaries, counted, never parsed."""

from typing import Final

HELD_BYTES_MAX: Final = 262_144
"""A longer unfinished event is passed on in pieces."""


class EventCutter:
    """Hands on whole events and holds back the beginning of one that is not complete yet."""

    __slots__ = ("events", "held", "open")

    def __init__(self) -> None:
        self.events = 0
        self.held = b""
        self.open = False
        """Whether what was handed on ends inside an event."""

    def feed(self, data: bytes) -> bytes:
        """Take in bytes of the stream and hand on what is complete."""
        if self.held:
            data = self.held + data
            self.held = b""
        if data.endswith(b"\n\n"):  # nearly always, and then mostly one event of one line
            self.events += 1 if data.find(b"\n") == len(data) - 2 else data.count(b"\n\n")
            self.open = False
            return data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:  # neither was found
            end = 0
        whole, rest = data[:end], data[end:]
        if whole:
            self.events += whole.count(b"\n\n") + whole.count(b"\r\n\r\n")
            self.open = False
        if len(rest) > HELD_BYTES_MAX:
            self.open = True
            return data
        self.held = rest
        return whole


def last_data(events: bytes) -> bytes:
    """The data of the last of these whole events, if it is one line."""
    last = events.rstrip(b"\r\n").rpartition(b"\n")[2]
    return last.removeprefix(b"data:").strip()
