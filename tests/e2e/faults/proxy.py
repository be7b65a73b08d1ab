"""A TCP proxy in front of a worker, in the test's own loop, that corrupts responses and rewrites load reports."""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

LOAD: Final = b"GET /load"
RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER 0: closing sends a reset."""
END: Final = b"\r\n\r\n"


@dataclass(frozen=True)
class Fault:
    """What becomes of an answer: so many of its events are passed on, then `say` is sent, and that is the end."""

    say: bytes = b""
    after: int = 0
    """0: the worker is not even asked. Otherwise an answer that is no stream is lost when all of it is there."""
    end: Literal["reset", "close", "wait"] = "reset"
    """`wait`: it is the gateway's turn, to close or to ask on, which is not answered."""


Lie = Callable[[bytes], bytes | None]
"""Makes of the load report of the worker what the gateway gets; None: nothing, ever."""


class Proxy:
    """Stands before one worker. `fault` hits answers to requests, `lie` the answers to load polls."""

    def __init__(self, host: str, port: int) -> None:
        self.worker = host, port
        self.fault: Fault | None = None
        self.lie: Lie | None = None
        self.asked = 0
        """Requests, without load polls."""
        self.broken = 0
        self.lies = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            theirs, ours = await asyncio.open_connection(*self.worker)
            try:
                await _Line(self, reader, writer, theirs, ours).run()
            finally:
                ours.transport.abort()
        if not writer.is_closing():
            writer.close()


@dataclass
class _Line:
    """A connection of a gateway, and the one to the worker that belongs to it."""

    proxy: Proxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    theirs: asyncio.StreamReader
    ours: asyncio.StreamWriter

    async def run(self) -> None:
        """Serve it to its end."""
        while True:
            request = await _message(self.reader)
            load = request.startswith(LOAD)
            if not await (self._load(request) if load else self._answer(request)):
                return

    async def _load(self, request: bytes) -> bool:
        self.ours.write(request)
        answer = await _message(self.theirs)
        if self.proxy.lie is None:
            self.writer.write(answer)
            return True
        self.proxy.lies += 1
        told = self.proxy.lie(answer.partition(END)[2])
        if told is None:
            await self.reader.read()
            return False
        self.writer.write(told)
        return True

    async def _answer(self, request: bytes) -> bool:
        self.proxy.asked += 1
        fault = self.proxy.fault
        if fault is None or fault.after:
            self.ours.write(request)
            whole = await self._pass_on(fault.after if fault is not None else None)
            if whole or fault is None:
                return whole
            if self.reader.at_eof():
                return False
        self.proxy.broken += 1
        self.writer.write(fault.say)
        with suppress(ConnectionError):
            await self.writer.drain()
        if fault.end == "wait":
            await self.reader.read(1)
        elif fault.end == "reset":
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()
        return False

    async def _pass_on(self, events_max: int | None) -> bool:
        """Pass an answer on as it is; False if not all of it was passed on."""
        head = await self.theirs.readuntil(END)
        length = _length(head)
        if length is not None:
            body = await self.theirs.readexactly(length)
            if events_max is None:
                self.writer.write(head + body)
            return events_max is None
        self.writer.write(head)
        events = 0
        while events != events_max and not self.reader.at_eof():
            size = await self.theirs.readuntil(b"\r\n")
            self.writer.write(size)
            if not int(size, 16):
                break
            self.writer.write(await self.theirs.readexactly(int(size, 16) + 2))
            events += 1
        else:
            return False
        while (trailer := await self.theirs.readuntil(b"\r\n")) != b"\r\n":
            self.writer.write(trailer)
        self.writer.write(trailer)
        return True


async def _message(reader: asyncio.StreamReader) -> bytes:
    """A whole message that says how long it is, or has only a head."""
    head = await reader.readuntil(END)
    return head + await reader.readexactly(_length(head) or 0)


def _length(head: bytes) -> int | None:
    fields = dict(line.lower().split(b": ", 1) for line in head.removesuffix(END).split(b"\r\n")[1:])
    length = fields.get(b"content-length")
    return int(length) if length is not None else None
