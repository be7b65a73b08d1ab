"""Clients that repeat a few questions over keep-alive connections and check every answer."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

STREAMS, WHOLE = 12, 4
CLIENTS = STREAMS + WHOLE
TOKENS = 50
PATIENCE_S = 30.0
POLL_S = 0.01
CHAT = "/v1/chat/completions"


class _Part(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Part = _Part()
    message: _Part = _Part()
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    code: str = ""


class _Document(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


@dataclass(slots=True)
class Seen:
    """What a client got for one question. `gateway` tells gateway processes apart; "" if none has answered."""

    story: int
    stream: bool
    client: int = 0
    status: int = 0
    replica: str = ""
    revision: str = ""
    gateway: str = ""
    text: str = field(default="", repr=False)
    error: str = ""
    asked_at: int = -1
    number: int = -1
    """The number of this answer, by their ends, and of the next one when it was asked."""


class Lost(Exception):  # noqa: N818 - states the condition
    """The connection ended before the answer did."""


class Client:
    """One client with one connection at a time."""

    tokens = TOKENS
    """Every answer has so many."""
    patience_s = PATIENCE_S

    def __init__(self, port: int, model: str) -> None:
        self.gateway = ""
        """The gateway process at the other end, as of the last answer."""
        self._port = port
        self._model = model
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, story: int, *, stream: bool, begun: Callable[[], None] | None = None) -> Seen:
        """Ask for a story. `begun` is called at its first text. What is wrong with the answer is its `error`."""
        seen = Seen(story, stream, gateway=self.gateway)
        try:
            async with asyncio.timeout(self.patience_s):
                await self._exchange(seen, begun)
        except TimeoutError:
            seen.error = f"no end within {self.patience_s:g} s"
        except (OSError, EOFError, Lost) as error:
            seen.error = seen.error or f"cut: {error!r}"
        if seen.error:
            self.close()
        return seen

    def close(self) -> None:
        """Leave."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None
        self.gateway = ""

    async def _exchange(self, seen: Seen, begun: Callable[[], None] | None) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        assert self._reader is not None
        path, question = self._question(seen)
        body = msgspec.json.encode({"model": self._model, **question})
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = answered[:-4].split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        seen.status = int(first.split(" ")[1])
        seen.replica = headers.get("x-forebay-replica", "")
        seen.revision = headers.get("x-forebay-model-revision", "")
        seen.gateway = self.gateway = headers.get("x-request-id", "")[:20]  # what follows is a count
        if "content-length" in headers:
            self._judge_whole(seen, await self._reader.readexactly(int(headers["content-length"])))
        else:
            await self._judge_stream(seen, begun)
        if headers.get("connection") == "close":
            self.close()

    def _question(self, seen: Seen) -> tuple[str, dict[str, Any]]:
        """Where to ask, and what besides the model."""
        return CHAT, {
            "messages": [{"role": "user", "content": f"Story number {seen.story}: tell me about the sea."}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": seen.stream,
            **({"stream_options": {"include_usage": True}} if seen.stream else {}),
        }

    def _judge_whole(self, seen: Seen, body: bytes) -> None:
        try:
            said = msgspec.json.decode(body, type=_Document)
        except msgspec.DecodeError as error:
            seen.error = f"no document: {error}"
            return
        reason = None
        if said.choices:
            seen.text, reason = said.choices[0].message.content or "", said.choices[0].finish_reason
        self._judge(seen, said.error, reason, said.usage)

    async def _judge_stream(self, seen: Seen, begun: Callable[[], None] | None) -> None:
        text: list[str] = []
        reason, usage, error, done, rest = None, None, None, 0, b""
        async for data in self._chunks():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    done += 1
                    continue
                said = msgspec.json.decode(event.removeprefix(b"data: "), type=_Document)
                usage, error = said.usage or usage, said.error or error
                for choice in said.choices:
                    if choice.delta.content:
                        if begun is not None and not text:
                            begun()
                        text.append(choice.delta.content)
                    reason = choice.finish_reason or reason
            if error is not None:
                seen.error = error.code  # the connection is cut after it
        seen.text = "".join(text)
        self._judge(seen, error, reason, usage)
        if not seen.error and (done != 1 or rest):
            seen.error = f"{done} ends, and then {rest!r}"

    def _judge(self, seen: Seen, error: _Error | None, reason: str | None, usage: _Usage | None) -> None:
        tokens = usage.completion_tokens if usage is not None else None
        if error is not None:
            seen.error = error.code
        elif (seen.status, reason, tokens) != (200, "length", self.tokens):
            seen.error = f"status {seen.status}, ended by {reason} after {tokens} tokens"

    async def _chunks(self) -> AsyncIterator[bytes]:
        assert self._reader is not None
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        if await self._reader.readuntil(b"\r\n") != b"\r\n":
            raise Lost("trailers that nobody asked for")


class Patient(Client):
    """One that asks a real model: for few words, and there may be no replica at all yet."""

    tokens = 12
    patience_s = 120.0


@dataclass
class Load:
    """What all clients have seen so far, in order of the ends."""

    texts: Mapping[int, str | None]
    """What the answers are when nothing happens; None: not always the same."""
    seen: list[Seen] = field(default_factory=list)
    begun: int = 0
    over: bool = False

    def bad(self) -> list[Seen]:
        """Whatever is not a whole answer with the text of an undisturbed one."""
        return [each for each in self.seen if each.error or not self._is_usual(each)]

    def _is_usual(self, seen: Seen) -> bool:
        text = self.texts[seen.story]
        return bool(seen.text) if text is None else seen.text == text

    def shares(self, last: int) -> Counter[str]:
        """How many of the last answers began at which replica."""
        return Counter(each.replica for each in self.seen[-last:])

    def last(self) -> Counter[str]:
        """How many clients had their last answer begin at which replica."""
        return Counter({each.client: each.replica for each in self.seen}.values())

    async def more(self, ends: int) -> None:
        """Wait for so many more answers."""
        enough = len(self.seen) + ends
        await self.until(f"{ends} more answers", lambda: len(self.seen) >= enough)

    async def streaming(self, streams: int) -> None:
        """Wait until so many more streams have begun."""
        enough = self.begun + streams
        await self.until(f"{streams} more streams", lambda: self.begun >= enough)

    async def until(self, what: str, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait while the clients go on."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {timeout_s} s; {self.last()}; last: {self.seen[-3:]}") from None

    async def keep_asking(self, client: Client, number: int, *, stream: bool) -> None:
        """Ask until it is over."""
        story = number % len(self.texts)
        try:
            while not self.over:
                asked_at = len(self.seen)
                seen = await client.ask(story, stream=stream, begun=self._count)
                seen.client, seen.asked_at, seen.number = number, asked_at, len(self.seen)
                self.seen.append(seen)
        finally:
            client.close()

    def _count(self) -> None:
        self.begun += 1


async def burst(port: int, model: str, stories: Sequence[int], *, stream: bool) -> list[Seen]:
    """Ask for all these at once, each over a connection of its own."""
    clients = [Client(port, model) for _ in stories]
    try:
        return await asyncio.gather(*(c.ask(n, stream=stream) for n, c in zip(stories, clients, strict=True)))
    finally:
        for client in clients:
            client.close()


async def undisturbed(port: int, model: str, stories: int) -> dict[int, str]:
    """What each story is when nothing happens, asked both ways."""
    told = [await burst(port, model, range(stories), stream=stream) for stream in (False, True)]
    assert [each for each in told[0] + told[1] if each.error] == []
    whole, streams = ({each.story: each.text for each in seen} for seen in told)
    assert whole == streams
    return whole


@asynccontextmanager
async def loading(
    port: int,
    model: str,
    texts: Mapping[int, str | None],
    kind: type[Client] = Client,
    *,
    streams: int = STREAMS,
    whole: int = WHOLE,
) -> AsyncIterator[Load]:
    """Clients that ask until the block is left; then their last answers are awaited. Nothing is judged here."""
    load = Load(texts)
    async with asyncio.TaskGroup() as group:
        for number in range(streams + whole):
            group.create_task(load.keep_asking(kind(port, model), number, stream=number < streams))
        try:
            await load.streaming(streams)
            yield load
        finally:
            load.over = True
