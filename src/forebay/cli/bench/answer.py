"""Parses one response as it arrives: time of the first token, number of tokens, errors. No IO."""

from collections.abc import Callable

import msgspec

from forebay.wire.documents import UNREADABLE

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a plain response, such as an embedding batch; a stream buffers one event at a time."""
EVENT_BYTES_MAX = 8 * 1024 * 1024


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _Document(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_DECODE = msgspec.json.Decoder(_Document, strict=False)


def error_code(status: int, content: bytes) -> str:
    """`429 queue_full` or `502`: a label for the table of errors."""
    try:
        error = _DECODE.decode(content).error
    except UNREADABLE:
        return str(status)
    if isinstance(error, _Error):
        return f"{status} {error.code or error.type or ''}".strip()
    return str(status)


class Answer:
    """The state of one response; `on_done` is called once, with an error code or None."""

    def __init__(self, streaming: bool, clock: Callable[[], float], on_done: Callable[[str | None], None]) -> None:
        self._streaming = streaming
        self._clock = clock
        self._on_done: Callable[[str | None], None] | None = on_done
        self._status = 0
        self._kept = bytearray()
        self._ended = False
        self.first_s: float | None = None
        """When the first token arrived."""
        self.last_s: float | None = None
        """When the latest token arrived."""
        self.ended_s = 0.0
        self.pieces = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The status line and headers arrived."""
        self._status = status

    def on_body(self, data: bytes) -> None:
        """A part of the body arrived."""
        streams = self._status == 200 and self._streaming
        lone = data.startswith(b"data:") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2
        if lone and streams and not self._kept:  # nearly always one event of one line
            self._event(data[5:].strip())
            return
        self._kept += data
        if streams:
            self._events()
        elif len(self._kept) > ANSWER_BYTES_MAX:
            self._done("answer_too_large")

    def on_end(self, trailers: list[tuple[bytes, bytes]]) -> None:
        """The response is complete."""
        if self._status != 200:
            self._done(error_code(self._status, bytes(self._kept)))
        elif self._streaming:
            self._done(None if self._ended else "stream_incomplete")
        else:
            self._plain()

    def fail(self, code: str) -> None:
        """The response will not come, or not completely."""
        self._done(code if not self.pieces else f"{code} in stream")

    def _done(self, code: str | None) -> None:
        if self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            self.ended_s = self._clock()
            on_done(code)

    def _plain(self) -> None:
        try:
            document = _DECODE.decode(bytes(self._kept))
        except UNREADABLE:
            return self._done("answer_unreadable")
        self.first_s = self.last_s = self._clock()
        if document.usage:
            self.prompt_tokens, self.output_tokens = document.usage.prompt_tokens, document.usage.completion_tokens
        return self._done(None)

    def _events(self) -> None:
        *events, rest = bytes(self._kept).replace(b"\r\n", b"\n").split(b"\n\n")
        if not events:
            if len(rest) > EVENT_BYTES_MAX:
                self._done("event_too_large")
            return
        self._kept = bytearray(rest)
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            document = _DECODE.decode(data)
        except UNREADABLE:
            return self._done("event_unreadable")
        if document.error is not None:
            code = document.error.code if isinstance(document.error, _Error) else None
            return self._done(f"{code or 'error'} in stream")
        if document.usage:
            self.prompt_tokens, self.output_tokens = document.usage.prompt_tokens, document.usage.completion_tokens
        for choice in document.choices:
            text = choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content))
            if text:
                self.last_s = self._clock()
                self.first_s = self.first_s or self.last_s
                self.pieces += 1
        return None
