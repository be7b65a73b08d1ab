"""Relays a stream of server-sent events: splits it at event boundaries, counts events, and collects the text.

The text lets another replica continue the stream if this one fails. Parsing every event would cost more than relaying
it, but the JSON around the text is the same in all events of a choice: the text is what remains after removing it.
Events are collected and processed a few at a time: where several arrived in one read, removing what surrounds their
texts is one `replace`. Only events that do not match are parsed.

In Anthropic's Messages and OpenAI's Responses several events follow the text, and a stream could not be resumed
between these: they are passed on together, once the last one is there. So is the end of a choice with the token
counts that its client asked for.
"""

import re
from typing import Final, NamedTuple

import msgspec

from forebay.wire.apis.events import read_chunk, read_named
from forebay.wire.documents import UNREADABLE
from forebay.wire.errors import MESSAGES, RESPONSES

HELD_BYTES_MAX: Final = 262_144
"""A longer incomplete event is passed on in pieces."""
PENDING_MAX: Final = 8
"""How many reads are collected before they are processed."""
PENDING_FIRST: Final = 2
"""The same before the JSON around the text is known. More than one, as the first event must go out soon."""
LARGE_BYTES: Final = 8192
"""A read of this size is processed at once: eight of the largest would be 2 MB."""
TEXT_BYTES_MAX: Final = 4 * 1024 * 1024
"""A longer response cannot be resumed."""
END: Final = b"\n\n"
COUNTS_DUE: Final = b'"}],"usage":null}\n\n'
"""Ends the last event of a choice whose stream has token counts: the others have no reason to finish. Text cannot
contain it, as its quotes are escaped."""
NEWLINE: Final = 10
RETURN: Final = 13
"""As ints: `in` on bytes first tries one, and a bytes operand costs an exception."""
DONE: Final = b"[DONE]"
"""Ends a complete OpenAI stream."""
ENDS: Final = (b'{"type":"message_stop"', b'{"type":"response.completed"', b'{"type":"response.incomplete"')
"""How the data of the last event begins in a complete stream of Anthropic's Messages and of OpenAI's Responses."""
CLOSING: Final = {MESSAGES: b"event: content_block_stop\n", RESPONSES: b"event: response.output_text.done\n"}
"""The line that begins the end of a response, by path; text cannot contain it, as JSON has no raw newlines."""
TEXT_EVENTS: Final = (b"event: content_block_delta\n", b"event: response.output_text.delta\n")
"""How events with text begin in Messages and Responses."""
TEXTLESS: Final = (
    b'"role":"assistant","content":""', b'"delta":{}', b'"text":"","logprobs":null', b'"choices":[]', b'{"error":',
)  # fmt: skip
"""Marks events of chat or text completions without text; text cannot contain them, as its quotes are escaped: the
role, the end of a choice of either, token counts, an error."""
KEYS: Final = (b'"content":"', b'"text":"', b'"delta":"')
NUMBER: Final = b'","type":"response.output_text.delta","sequence_number":'
"""What follows the text of an event of Responses, up to its number."""
TEXTS: Final = frozenset({"content_block_delta", "response.output_text.delta"})
OPENINGS: Final = frozenset(
    {
        "message_start",
        "content_block_start",
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)
"""Events that precede the text."""

SEAM_ID: Final = re.compile(r"[!-+\--~]{1,128}")
"""Ids that are safe in a header, in a comma-separated list. Others could be anything, such as a whole request."""

_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


class ResumeState(NamedTuple):
    """The state of a broken stream after `events` events. `finished`: its text is complete, only its end is
    missing."""

    id: str
    created: int
    text: bytes
    finished: bool
    events: int

    @property
    def seam(self) -> bytes:
        """The value of `x-forebay-continue` for the worker that resumes the stream, which gets the text too."""
        return b"%b,%d,%d,%d" % (self.id.encode(), self.created, len(self.text), self.events)


class Transcript:
    """Passes on whole events, holds back incomplete ones, and collects the text. `path` is the request's.

    Nothing is collected of a stream that is not `resumable`.
    """

    __slots__ = (
        "_closing", "_created", "_events", "_finished", "_id", "_named", "_pending", "_prefix", "_resumable",
        "_suffix", "_text", "_textless", "end", "held", "last", "open",
    )  # fmt: skip

    def __init__(self, path: str = "", *, resumable: bool = True) -> None:
        self.held = b""
        self.end = b""
        """The end of the choice that was held back, for a stream that nobody can go on with."""
        self.open = False
        """Whether the data passed on so far ends inside an event."""
        self.last = b""
        """The data passed on last."""
        self._named = path in CLOSING
        self._closing = CLOSING.get(path) if resumable else None
        """The mark from which on the end of the stream is held back."""
        self._pending: list[bytes] = []
        self._events = 0
        self._textless = 0
        self._text = bytearray()  # as in JSON, still escaped
        self._prefix = b""
        self._suffix = b""
        self._id = ""
        self._created = 0
        self._finished = False
        self._resumable = resumable

    def feed(self, data: bytes) -> bytes:
        """Take data of the stream and return what can be passed on."""
        if self.held:
            data = self.held + data
            self.held = b""
        if data.endswith(b"\n\n"):  # nearly always
            self.open = False
        else:
            data = self._cut(data)
            if not data:
                return data
        if self._closing is not None and data.find(self._closing) >= 0:
            data = self._hold_end(data)
            if not data:
                return data
        elif data.endswith(COUNTS_DUE) and self._resumable:
            data = self._hold_last(data)
            if not data:
                return data
        self.last = data
        pending = self._pending
        if not pending and self._take_one(data):
            return data
        pending.append(data)
        most = PENDING_MAX if self._prefix or not self._resumable else PENDING_FIRST
        if len(pending) >= most or len(data) >= LARGE_BYTES:
            self._take_apart()
        return data

    @property
    def events(self) -> int:
        """How many whole events were passed on."""
        self._take_apart()
        return self._events

    @property
    def content_events(self) -> int:
        """How many of these had text: about as many as the tokens generated so far."""
        self._take_apart()
        return max(0, self._events - self._textless)

    @property
    def bytes_held(self) -> int:
        """Memory used by the text, in bytes."""
        self._take_apart()
        return len(self._text)

    @property
    def resumable(self) -> bool:
        """Whether another replica could continue from here, with some text to come. Held-back data is kept."""
        held, said = self.held, self.state()
        self.held = held
        return said is not None and not said.finished

    def state(self) -> ResumeState | None:
        """The state to resume from; None if the stream cannot be resumed. Held-back data is dropped."""
        self.held = b""
        self._take_apart()
        if not self._resumable or self.open or not SEAM_ID.fullmatch(self._id):
            return None
        try:
            text: str = _text(b'"%b"' % bytes(self._text))
        except UNREADABLE:  # for example a lone surrogate, which some engines send
            return None
        return ResumeState(self._id, self._created, text.encode(), self._finished, self._events)

    def _cut(self, data: bytes) -> bytes:
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4:  # neither was found
            end = 0
        whole, rest = data[:end], data[end:]
        if whole:
            self.open = False
        if len(rest) > HELD_BYTES_MAX:
            self.open = True
            self._give_up()
            return data
        self.held = rest
        return whole

    def _hold_end(self, data: bytes) -> bytes:
        """Hold back the events from the beginning of the stream's end on, unless it is complete."""
        assert self._closing is not None
        if ended(last_data(data)):
            return data
        at = data.index(self._closing)
        end = data[at:] + self.held
        if len(end) > HELD_BYTES_MAX:
            self._give_up()
            return data
        self.held = end
        return data[:at]

    def _hold_last(self, data: bytes) -> bytes:
        """Hold back the last event, which the token counts follow."""
        at = data.rfind(END, 0, len(data) - len(END)) + len(END)
        if at < len(END):  # it is the only one
            at = 0
        self.end = data[at:]
        self.held = self.end + self.held
        return data[:at]

    def _give_up(self) -> None:
        """The stream cannot be resumed any more."""
        self._resumable = False
        self._closing = None

    def _take_apart(self) -> None:
        events = b"".join(self._pending)
        self._pending.clear()
        if RETURN in events:
            events = events.replace(b"\r\n", b"\n")
        self._events += events.count(END)
        if events and not (self._resumable and self._take_alike(events)):
            self._take_each(events.split(END))
        if len(self._text) > TEXT_BYTES_MAX:
            self._give_up()
        if not self._resumable:
            self._text.clear()

    def _take_each(self, events: list[bytes]) -> None:
        """The last one is incomplete, and nearly always empty."""
        silent, read = (silent_named, self._read_named) if self._named else (silent_plain, self._read)
        for event in events[:-1]:
            known = len(self._text)
            if self._resumable and not self._take_alike(event + END):  # reading one may show what surrounds all texts
                read(event)
                if self._resumable and len(self._text) == known:
                    self._textless += 1
            if not self._resumable and silent(event):
                self._textless += 1
        if self._resumable and events[-1]:
            read(events[-1])

    def _take_one(self, event: bytes) -> bool:
        """Take the text of an event that differs from those before in nothing else; False if it does."""
        prefix, suffix = self._prefix, self._suffix
        if not (prefix and self._resumable and event.startswith(prefix) and event.endswith(suffix)):
            return False
        end = len(event) - len(suffix)
        if end < len(prefix) or NEWLINE in (text := event[len(prefix) : end]):
            return False
        self._events += 1
        self._text += text
        if len(self._text) > TEXT_BYTES_MAX:
            self._give_up()
            self._text.clear()
        return True

    def _take_alike(self, events: bytes) -> bool:
        """Take the text of events that differ in nothing else; False if they do."""
        if not self._prefix:
            return False
        if self._suffix.startswith(NUMBER):
            return self._take_numbered(events)
        seam = self._suffix + self._prefix
        rest = events.replace(seam, b"")  # raw newlines occur between events only, never within text
        if not (rest.startswith(self._prefix) and rest.endswith(self._suffix)) or len(rest) < len(seam):
            return False
        text = rest[len(self._prefix) : -len(self._suffix)]  # compiled slices must not get a negative length
        if NEWLINE in text:
            return False
        self._text += text
        return True

    def _take_numbered(self, events: bytes) -> bool:
        """The same for events that also differ in their sequence number."""
        before, *rest = events.split(self._prefix)
        texts = []
        for event in rest:
            text, _, number = event.partition(NUMBER)
            if NEWLINE in text or not number[:-3].isdigit():
                return False
            texts.append(text)
        if before:
            return False
        self._text += b"".join(texts)
        return True

    def _read(self, event: bytes) -> None:
        if not event.startswith(b"data:"):  # a comment, or nothing
            return
        data = event[5:].strip()
        if data == DONE:
            return
        try:
            chunk = read_chunk(data)
        except UNREADABLE:
            self._give_up()
            return
        self._id, self._created = chunk.id, chunk.created
        for choice in chunk.choices:
            delta = choice.delta
            if choice.index or (delta is not None and (delta.tool_calls or delta.function_call)):
                self._give_up()
                return
            new = (delta.content if delta is not None else choice.text) or ""
            if new:
                self._take_in(event, _encode(new)[1:-1], last=choice.finish_reason is not None)
            self._finished = self._finished or choice.finish_reason is not None

    def _read_named(self, event: bytes) -> None:
        data = event.partition(b"data:")[2]
        if not data:  # a comment, or nothing
            return
        try:
            said = read_named(data)
        except UNREADABLE:
            self._give_up()
            return
        begun, delta = said.message or said.response, said.delta
        if delta is not None and said.type in TEXTS and not (said.index or said.output_index or said.content_index):
            text = delta if isinstance(delta, str) else delta.text
            self._take_in(event, _encode(text)[1:-1], last=False)
        elif said.type not in OPENINGS or delta is not None:
            self._give_up()
        elif begun is not None:
            self._id, self._created = begun.id, begun.created_at

    def _take_in(self, event: bytes, text: bytes, *, last: bool) -> None:
        """Append the text of an event, and remember what surrounds it unless it is the last one."""
        self._text += text
        for key in KEYS:
            before, found, after = event.partition(key)
            if found and after.startswith(text) and not last:
                self._prefix = before + found
                self._suffix = after[len(text) :] + END
                return


def ended(last: bytes) -> bool:
    """Whether this is the last data of a complete stream."""
    return last == DONE or last.startswith(ENDS)


def silent_plain(event: bytes) -> bool:
    """Whether an event of chat or text completions has no text."""
    if not event.startswith(b"data:") or event.endswith(DONE):
        return True
    return any(event.find(mark) >= 0 for mark in TEXTLESS)


def silent_named(event: bytes) -> bool:
    """The same for Messages and Responses."""
    return not event.startswith(TEXT_EVENTS)


def last_data(events: bytes) -> bytes:
    """The data of the last of these whole events, if it is one line."""
    last = events.rstrip(b"\r\n").rpartition(b"\n")[2]
    return last.removeprefix(b"data:").strip()
