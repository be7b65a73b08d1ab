"""Clients of a simulated cluster: they send requests, read at their own pace, and may disconnect; each knows the
right response."""

import asyncio
from enum import StrEnum
from functools import lru_cache
from itertools import count
from random import Random
from typing import Final, NamedTuple, cast

import httptools
import msgspec

from forebay.core.errors import Code
from forebay.engines.protocol import Begun, Delta, Finished
from forebay.engines.synthetic import SyntheticEngine
from forebay.sim.full.event_log import EventLog
from forebay.wire.openai_answer import ChatAnswer
from forebay.wire.openai_request import parse_chat
from forebay.worker.preflight import chat_work

MODEL: Final = "chat"
TOPICS: Final = 6
"""Prompts of one topic share a prefix."""
TOPIC_WORDS: Final = 300
WORDS: Final = ("river", "stone", "wheel", "pool", "mill", "rain", "bank", "lock", "weir", "ford")
CODES: Final = frozenset(code.value for code in Code)
HEAD: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n"
    b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n%b"
)
READ_PAUSE_S: Final = 0.2
"""Pause between reads of a slow reader."""


class Undisturbed(NamedTuple):
    """The response of an undisturbed replica."""

    text: str
    reason: str
    prompt_tokens: int
    completion_tokens: int


def make_body(rng: Random, *, stream: bool, tokens_max: int) -> bytes:
    """The body of a chat request."""
    topic = Random(rng.randrange(TOPICS))  # noqa: S311 - chance that can be repeated
    words = [topic.choice(WORDS) for _ in range(topic.randrange(TOPIC_WORDS))]
    words += [rng.choice(WORDS) for _ in range(1 + rng.randrange(20))]
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": 1 + rng.randrange(tokens_max),
            "temperature": 0,
            "stream": stream,
        }
    )


@lru_cache(maxsize=4096)
def undisturbed(body: bytes) -> Undisturbed:
    """The complete response to a request."""
    engine = SyntheticEngine("", {"task": "chat", "step_ms": 0.0, "prefill_tokens_per_s": 1e9})
    [work] = chat_work(parse_chat(body), engine.load(), "id", ChatAnswer.names)
    engine.add(work, 0.0)
    text = ""
    for now in count(1):
        for event in engine.step(float(now)).events:
            match event:
                case Begun():
                    pass
                case Delta():
                    text += event.text
                case Finished():
                    return Undisturbed(text, event.reason, event.prompt_tokens, event.completion_tokens)
                case _:
                    raise AssertionError(event)
    raise AssertionError("unreachable")


class Ending(StrEnum):
    """How a request ended for its client."""

    OPEN = "open"
    COMPLETE = "complete"
    ERROR = "error"
    """An error response: as a status, or in the stream."""
    CUT = "cut"
    """The connection was closed or reset."""
    REFUSED = "refused"
    """The connection was refused."""
    LEFT = "left"
    """The client disconnected."""


class ClientRequest:
    """One request and its result."""

    def __init__(
        self, id: str, body: bytes, right: Undisturbed, *, stream: bool, node: str, more: bytes = b""
    ) -> None:
        self.id = id
        self.body = body
        self.right = right
        self.stream = stream
        self.node = node
        self.more = more
        """Additional header lines."""
        self.leaves_after: int | None = None
        """Number of events after which the client disconnects."""
        self.slow = False
        self.ending = Ending.OPEN
        self.code = ""
        """The error code."""
        self.status = 0
        self.text = ""
        self.reason = ""
        self.dones = 0
        self.events = 0
        self.names: dict[tuple[object, object], None] = {}
        """Id and time of the stream, from its events."""
        self.began = 0.0
        self.ended = 0.0

    @property
    def request(self) -> bytes:
        """The request as bytes."""
        return HEAD % (self.id.encode(), self.more, len(self.body), self.body)


class Connection(asyncio.Protocol):
    """A connection to a gateway, with its response parser."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._asked: ClientRequest | None = None
        self._over: asyncio.Future[None] | None = None
        self._rest = b""
        self._body = b""
        self._resting: asyncio.TimerHandle | None = None
        self.open = False

    async def ask(self, asked: ClientRequest) -> None:
        """Send a request, and return when it has ended in any way."""
        self._asked, self._rest, self._body = asked, b"", b""
        self._over = self._loop.create_future()
        self._transport.write(asked.request)
        if asked.slow:
            self._rest_a_while()
        await self._over

    def leave(self) -> None:
        """Close it."""
        self.open = False
        if self._resting is not None:
            self._resting.cancel()
        self._transport.abort()

    def _end(self, ending: Ending, code: str = "") -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        asked.ending, asked.code, asked.ended = ending, code, self._loop.time()
        assert self._over is not None
        self._over.set_result(None)
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
            self._transport.resume_reading()

    def _rest_a_while(self) -> None:
        if self._transport.is_reading():
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        self._resting = self._loop.call_later(READ_PAUSE_S, self._rest_a_while)

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            asked = self._asked
            self._event_log.violated(
                "responses are valid HTTP", f"{asked.id if asked else 'unasked'}: {error!r} {data[:80]!r}"
            )
            self._end(Ending.CUT, "protocol")
            self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(Ending.ERROR if self._asked is not None and self._asked.code else Ending.CUT, self._error_code())

    def _error_code(self) -> str:
        return self._asked.code if self._asked is not None else ""

    # --- the parser

    def on_headers_complete(self) -> None:
        """The response head is complete."""
        if self._asked is not None:
            self._asked.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        asked = self._asked
        if asked is None:
            self._event_log.expect(not self.open, "no response without a request", repr(data[:80]))
            return
        if asked.status != 200 or not asked.stream:
            self._body += data
            return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            self._event(asked, event)

    def _event(self, asked: ClientRequest, event: bytes) -> None:
        data = event.removeprefix(b"data: ")
        asked.events += 1
        if data == b"[DONE]":
            asked.dones += 1
            return
        try:
            told = msgspec.json.decode(data)
        except msgspec.DecodeError:
            if data.strip(b"\r\n"):  # a truncated event is terminated before the error
                self._event_log.expect(
                    data and not asked.dones, "stream events are complete", f"{asked.id}: {data[:80]!r}"
                )
            return
        if "error" in told:
            asked.code = told["error"]["code"]
            return
        asked.names[told["id"], told["created"]] = None
        for choice in told["choices"]:
            asked.text += choice["delta"].get("content") or ""
            asked.reason = choice.get("finish_reason") or asked.reason
        if asked.leaves_after is not None and asked.events >= asked.leaves_after:
            self._end(Ending.LEFT)
            self.leave()

    def on_message_complete(self) -> None:
        """The response is complete."""
        asked = self._asked
        if asked is None or asked.status < 200:
            return
        if asked.status != 200:
            self._end(Ending.ERROR, _code(self._body))
        elif asked.stream:
            self._end(Ending.ERROR if asked.code else Ending.COMPLETE, asked.code)
        else:
            choice = msgspec.json.decode(self._body)["choices"][0]
            asked.text, asked.reason = choice["message"]["content"], choice["finish_reason"]
            self._end(Ending.COMPLETE)
        if not self._parser.should_keep_alive():
            self.leave()


def _code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"no error object: {body[:80]!r}"


def judge(asked: ClientRequest, event_log: EventLog, excused: bool) -> None:
    """Check that a client's response is right, whatever happened. `excused`: its connection may have been broken."""
    right, id = asked.right, asked.id
    if asked.ending is Ending.COMPLETE:
        event_log.expect(asked.text == right.text, "a complete response has the expected text", _difference(asked))
        event_log.expect(
            asked.reason == right.reason,
            "a complete response has the expected finish reason",
            f"{id}: {asked.reason!r}",
        )
        event_log.expect(asked.dones == asked.stream, "a complete stream has one [DONE]", f"{id}: {asked.dones}")
    else:
        event_log.expect(right.text.startswith(asked.text), "no text is lost or repeated", _difference(asked))
        event_log.expect(
            not asked.dones or asked.ending is Ending.LEFT or excused, "no [DONE] after an incomplete response", id
        )
    event_log.expect(len(asked.names) <= 1, "a stream keeps its id and creation time", f"{id}: {list(asked.names)}")
    if asked.ending is Ending.ERROR:
        event_log.expect(asked.code in CODES, "an error has a known code", f"{id}: {asked.code}")
    if asked.ending is Ending.CUT:
        event_log.expect(
            excused, "no response is cut off without an error", f"{id} {asked.status} after {asked.events} events"
        )


def _difference(asked: ClientRequest) -> str:
    text, right = asked.text, asked.right.text
    same = next(
        (at for at, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right))
    )
    here, there = text[same : same + 40], right[same : same + 40]
    return f"{asked.id} differs after {same} of {len(right)}: {here!r}, not {there!r}"
