"""Clients in memory: they send requests, also several at once, read slowly, and leave."""

from typing import cast

import httptools
from tests.gateway.machine.loop import Pipe, VirtualLoop

from forebay.core.model import Limits
from forebay.net.connection import Connection
from forebay.net.server import HttpServer

LIMITS = Limits(stream_buffer_bytes_max=1000, pipelined_max=3)


class Answer:
    """What has come of an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False


class Client:
    """One connection to the gateway, seen from the far end: a `Host` for its transport."""

    reach = "open"

    def __init__(self, loop: VirtualLoop, server: HttpServer) -> None:
        self.answers: list[Answer] = []
        self.asked = 0
        self.left = False
        self.cut_off = False
        self._parser = httptools.HttpResponseParser(self)
        self._connection = Connection(server)
        self.pipe = Pipe(loop, self._connection, self)
        self._connection.connection_made(self.pipe)

    @property
    def open(self) -> bool:
        """Whether it may ask and be answered."""
        return not self.pipe.closing

    def ask(self, request: bytes) -> None:
        self.asked += 1
        self.pipe.deliver(request)

    def leave(self) -> None:
        self.left = True
        self.pipe.cut()

    def falls_behind(self, far: bool) -> None:
        """It does not read; `far`: there is more unread than the server means to keep."""
        if self.open:
            self.pipe.backlog_bytes = 2000 if far else 500
            self._connection.pause_writing()

    def catches_up(self) -> None:
        if self.open and self.pipe.backlog_bytes:
            self.pipe.backlog_bytes = 0
            self._connection.resume_writing()

    # --- the far end of its transport

    def accepted(self, pipe: Pipe) -> None:
        pass

    def received(self, pipe: Pipe, data: bytes) -> None:
        self._parser.feed_data(data)

    def closed(self, pipe: Pipe) -> None:
        self.cut_off = True

    # --- its parser

    def on_message_begin(self) -> None:
        self.answers.append(Answer())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answers[-1].headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.answers[-1].status = cast(int, self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.answers[-1].body += body

    def on_message_complete(self) -> None:
        self.answers[-1].complete = True
