"""A stream of server-sent events on its way through: cut at event boundaries, counted, and its text remembered.

The text lets another replica go on where one was lost. Parsing every event would cost more than relaying it, but what
surrounds the text is the same in all events of a choice: the text of an event that looks like those before it is what
is left between. Others are kept as they are, and every few of them are taken apart at once: where several came in one
read, cutting out what surrounds their texts is one `replace`. Only what does not look like that is parsed.

In Anthropic's Messages and OpenAI's Responses several events follow the text, and nobody could go on between these:
they are handed on together, when the last one is there.
"""

import re
from typing import Final, NamedTuple

import msgspec

from forebay.wire.apis.events import read_chunk, read_named
from forebay.wire.documents import UNREADABLE
from forebay.wire.errors import MESSAGES, RESPONSES

HELD_BYTES_MAX: Final = 262_144
"""A longer unfinished event is passed on in pieces."""
PENDING_MAX: Final = 8
"""Reads that are kept whole before they are taken apart."""
PENDING_FIRST: Final = 2
"""The same while it is not known what surrounds the text. More than one, as the first event is to go out soon."""
LARGE_BYTES: Final = 8192
"""A read of this size is taken apart at once: eight of the largest would be 2 MB."""
TEXT_BYTES_MAX: Final = 4 * 1024 * 1024
"""A longer answer cannot be resumed."""
END: Final = b"\n\n"
NEWLINE: Final = 10
"""As a number: for bytes, `in` first takes them for one, and pays for the exception that they are not."""
DONE: Final = b"[DONE]"
"""What ends a complete stream of OpenAI's."""
ENDS: Final = (b'{"type":"message_stop"', b'{"type":"response.completed"', b'{"type":"response.incomplete"')
"""How the data of the last event begins in a complete stream of Anthropic's Messages and of OpenAI's Responses."""
CLOSING: Final = {MESSAGES: b"event: content_block_stop\n", RESPONSES: b"event: response.output_text.done\n"}
"""The line that begins the end of an answer, by path; text cannot look like it, as it has no raw newline."""
TEXT_EVENTS: Final = (b"event: content_block_delta\n", b"event: response.output_text.delta\n")
"""How events with text begin in Messages and Responses."""
TEXTLESS: Final = (
    b'"role":"assistant","content":""', b'"delta":{}', b'"text":"","logprobs":null', b'"choices":[]', b'{"error":',
)  # fmt: skip
"""What shows that an event of chat or text completions has no text; text cannot look like it, as its quotes are
escaped: who speaks, the end of a choice of either, token counts, an error."""
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
"""Events that go before the text."""

SEAM_ID: Final = re.compile(r"[!-+\--~]{1,128}")
"""Ids that may stand in a header, in a list with commas. Others could be anything, a whole request for one."""

_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


class Said(NamedTuple):
    """What a broken stream has said, in `events`. `finished`: its text is complete, only its end is missing."""

    id: str
    created: int
    text: bytes
    finished: bool
    events: int

    @property
    def seam(self) -> bytes:
        """For the worker that is to go on, which gets the text too: the value of `x-forebay-continue`."""
        return b"%b,%d,%d,%d" % (self.id.encode(), self.created, len(self.text), self.events)


class Transcript:
    """Hands on whole events, holds back the beginning of one, and remembers the text. `path` is the request's.

    Nothing is remembered of a stream that is not `resumable`: nobody could go on with it.
    """

    __slots__ = (
        "_closing", "_created", "_events", "_finished", "_id", "_named", "_pending", "_prefix", "_resumable",
        "_suffix", "_text", "_textless", "held", "last", "open",
    )  # fmt: skip

    def __init__(self, path: str = "", *, resumable: bool = True) -> None:
        self.held = b""
        self.open = False
        """Whether what was handed on ends inside an event."""
        self.last = b""
        """What was handed on last."""
        self._named = path in CLOSING
        self._closing = CLOSING.get(path) if resumable else None
        """What is looked for to hold it back."""
        self._pending: list[bytes] = []
        self._events = 0
        self._textless = 0
        self._text = bytearray()  # as it stood in JSON
        self._prefix = b""
        self._suffix = b""
        self._id = ""
        self._created = 0
        self._finished = False
        self._resumable = resumable

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
        if self._closing is not None and data.find(self._closing) >= 0:
            data = self._hold_end(data)
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
        """How many whole events were handed on."""
        self._take_apart()
        return self._events

    @property
    def content_events(self) -> int:
        """How many of these had text: about as many as the tokens of the answer so far."""
        self._take_apart()
        return max(0, self._events - self._textless)

    @property
    def bytes_held(self) -> int:
        """Memory that the text takes."""
        self._take_apart()
        return len(self._text)

    @property
    def resumable(self) -> bool:
        """Whether another replica could go on from here, with some text to come. What is held back is kept."""
        held, said = self.held, self.said()
        self.held = held
        return said is not None and not said.finished

    def said(self) -> Said | None:
        """What was handed on so far; None if nobody else can go on from there. What is held back is dropped."""
        self.held = b""
        self._take_apart()
        if not self._resumable or self.open or not SEAM_ID.fullmatch(self._id):
            return None
        try:
            text: str = _text(b'"%b"' % bytes(self._text))
        except UNREADABLE:  # half a surrogate pair, say, as other engines may send
            return None
        return Said(self._id, self._created, text.encode(), self._finished, self._events)

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
        """Hold these events back from where the end of the answer begins, unless all of it is there."""
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

    def _give_up(self) -> None:
        """Nobody can go on with this any more."""
        self._resumable = False
        self._closing = None

    def _take_apart(self) -> None:
        events = b"".join(self._pending)
        self._pending.clear()
        self._events += events.count(END) + events.count(b"\r\n\r\n")
        if events and not (self._resumable and self._take_alike(events)):
            self._take_each(events.replace(b"\r\n", b"\n").split(END))
        if len(self._text) > TEXT_BYTES_MAX:
            self._give_up()
        if not self._resumable:
            self._text.clear()

    def _take_each(self, events: list[bytes]) -> None:
        """The last one is not whole, and nearly always empty."""
        for event in events[:-1]:
            if silent_named(event) if self._named else silent_plain(event):
                self._textless += 1
        if not self._resumable:
            return
        read = self._read_named if self._named else self._read
        for event in events:
            if not self._take_alike(event + END):  # the first may have told what surrounds the others' text
                read(event)

    def _take_one(self, event: bytes) -> bool:
        """Take the text out of an event that differs in nothing else from those before; False if it does."""
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
        """Take the text out of events that differ in nothing else; False if they do."""
        if not self._prefix:
            return False
        if self._suffix.startswith(NUMBER):
            return self._take_numbered(events)
        seam = self._suffix + self._prefix
        rest = events.replace(seam, b"")  # raw newlines stand between events only, never inside of text
        if not (rest.startswith(self._prefix) and rest.endswith(self._suffix)) or len(rest) < len(seam):
            return False
        text = rest[len(self._prefix) : -len(self._suffix)]  # compiled, this must not be of a negative length
        if NEWLINE in text:
            return False
        self._text += text
        return True

    def _take_numbered(self, events: bytes) -> bool:
        """The same of events that differ in their number too."""
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
        """Note the text of an event, and what surrounds it in all but the last one."""
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
    """The same of Messages and Responses."""
    return not event.startswith(TEXT_EVENTS)


def last_data(events: bytes) -> bytes:
    """The data of the last of these whole events, if it is one line."""
    last = events.rstrip(b"\r\n").rpartition(b"\n")[2]
    return last.removeprefix(b"data:").strip()
