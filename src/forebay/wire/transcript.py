"""A stream of server-sent events on its way through: cut at event boundaries, counted, and its text remembered.

The text lets another replica go on where one was lost. Parsing every event would cost more than relaying it, so
events are kept as they are, and every few of them are taken apart at once: what surrounds the text is the same in all
events of a choice, and cutting it out is one `replace`. Only what does not look like that is parsed.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

HELD_BYTES_MAX: Final = 262_144
"""A longer unfinished event is passed on in pieces."""
PENDING_MAX: Final = 16
"""Reads that are kept whole before they are taken apart."""
TEXT_BYTES_MAX: Final = 4 * 1024 * 1024
"""A longer answer cannot be resumed."""
END: Final = b"\n\n"
DONE: Final = b"[DONE]"
"""What ends a complete stream of OpenAI's."""
ENDS: Final = (b'{"type":"message_stop"', b'{"type":"response.completed"', b'{"type":"response.incomplete"')
"""How the data of the last event begins in a complete stream of Anthropic's Messages and of OpenAI's Responses."""
KEYS: Final = (b'"content":"', b'"text":"')


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str
    created: int
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Chunk).decode
_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Said:
    """What a broken stream has said. `finished`: its text is complete, only its end is missing."""

    id: str
    created: int
    text: bytes
    finished: bool


class Transcript:
    """Hands on whole events, holds back the beginning of one, and remembers the text of OpenAI's chunks."""

    __slots__ = (
        "_created", "_events", "_finished", "_id", "_pending", "_prefix", "_resumable", "_seam", "_suffix", "_text",
        "held", "last", "open",
    )  # fmt: skip

    def __init__(self) -> None:
        self.held = b""
        self.open = False
        """Whether what was handed on ends inside an event."""
        self.last = b""
        """What was handed on last."""
        self._pending: list[bytes] = []
        self._events = 0
        self._text = bytearray()  # as it stood in JSON
        self._prefix = b""
        self._suffix = b""
        self._seam = b""
        self._id = ""
        self._created = 0
        self._finished = False
        self._resumable = True

    def feed(self, data: bytes) -> bytes:
        """Take in bytes of the stream and hand on what is complete."""
        if self.held:
            data = self.held + data
            self.held = b""
        if data.endswith(b"\n\n"):  # nearly always
            self.open = False
        else:
            data = self._cut(data)
            if not data:
                return data
        self.last = data
        pending = self._pending
        pending.append(data)
        if len(pending) >= PENDING_MAX:
            self._take_apart()
        return data

    @property
    def events(self) -> int:
        """How many whole events were handed on."""
        self._take_apart()
        return self._events

    @property
    def bytes_held(self) -> int:
        """Memory that the text takes."""
        self._take_apart()
        return len(self._text)

    def said(self) -> Said | None:
        """What was handed on so far; None if nobody else can go on from there. What is held back is dropped."""
        self.held = b""
        self._take_apart()
        if not self._resumable or self.open or not self._id:
            return None
        try:
            text: str = _text(b'"%b"' % bytes(self._text))
        except (msgspec.DecodeError, UnicodeDecodeError):  # half a surrogate pair, say, as other engines may send
            return None
        return Said(self._id, self._created, text.encode(), self._finished)

    def _cut(self, data: bytes) -> bytes:
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:  # neither was found
            end = 0
        whole, rest = data[:end], data[end:]
        if whole:
            self.open = False
        if len(rest) > HELD_BYTES_MAX:
            self.open = True
            self._resumable = False
            return data
        self.held = rest
        return whole

    def _take_apart(self) -> None:
        events = b"".join(self._pending)
        self._pending.clear()
        self._events += events.count(END) + events.count(b"\r\n\r\n")
        if self._resumable and events and not self._take_alike(events):
            for event in events.replace(b"\r\n", b"\n").split(END):
                self._read(event)
        if len(self._text) > TEXT_BYTES_MAX:
            self._resumable = False
        if not self._resumable:
            self._text.clear()

    def _take_alike(self, events: bytes) -> bool:
        """Take the text out of events that differ in nothing else; False if they do."""
        if not self._prefix:
            return False
        rest = events.replace(self._seam, b"")  # raw newlines stand between events only, never inside of text
        text = rest[len(self._prefix) : -len(self._suffix)]
        if not (rest.startswith(self._prefix) and rest.endswith(self._suffix)) or b"\n" in text:
            return False
        self._text += text
        return True

    def _read(self, event: bytes) -> None:
        if not event.startswith(b"data:"):  # a comment, or nothing
            return
        data = event[5:].strip()
        if data == DONE:
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._resumable = False
            return
        self._id, self._created = chunk.id, chunk.created
        for choice in chunk.choices:
            delta = choice.delta
            if choice.index or (delta is not None and (delta.tool_calls or delta.function_call)):
                self._resumable = False
                return
            new = (delta.content if delta is not None else choice.text) or ""
            if new:
                self._take_in(event, _encode(new)[1:-1], last=choice.finish_reason is not None)
            self._finished = self._finished or choice.finish_reason is not None

    def _take_in(self, event: bytes, text: bytes, *, last: bool) -> None:
        """Note the text of an event, and what surrounds it in all but the last one."""
        self._text += text
        for key in KEYS:
            before, found, after = event.partition(key)
            if found and after.startswith(text) and not last:
                self._prefix = before + found
                self._suffix = after[len(text) :] + END
                self._seam = self._suffix + self._prefix


def ended(last: bytes) -> bool:
    """Whether this is the last data of a complete stream."""
    return last == DONE or last.startswith(ENDS)


def last_data(events: bytes) -> bytes:
    """The data of the last of these whole events, if it is one line."""
    last = events.rstrip(b"\r\n").rpartition(b"\n")[2]
    return last.removeprefix(b"data:").strip()
