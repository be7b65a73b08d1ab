"""A gRPC client without a library, to send what no library would send."""

import asyncio

from hpack import Encoder
from tests.wire.http2.peer import START, request

from forebay.wire.http2 import frames as h2

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
HEADERS = (
    (":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x"), ("te", "trailers"),
    ("content-type", "application/grpc"),
)  # fmt: skip


class Raw:
    """A client that says what it wants to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, start: bytes = START) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = Encoder()
        self.send(start)

    def close(self) -> None:
        self._writer.close()

    def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))

    def ask(self, id: int, data: bytes, **headers: str) -> None:
        changed = {name: headers.pop(name.strip(":"), value) for name, value in HEADERS}
        own = [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.send(request(id, self._encoder.encode([*changed.items(), *own]), data))

    def begin(self, id: int, data: bytes, path: str = INFER) -> None:
        """A call, and the first bytes of what it brings."""
        headers = [(name, path if name == ":path" else value) for name, value in HEADERS]
        head = h2.frame(h2.HEADERS, h2.END_HEADERS, id, self._encoder.encode(headers))
        self.send(head, h2.frame(h2.DATA, 0, id, data))

    async def frame(self) -> tuple[int, int, bytes]:
        """Type, stream and body of the next frame; type -1 at the end."""
        async with asyncio.timeout(10):
            try:
                high, low, kind, _, id = h2.HEAD.unpack(await self._reader.readexactly(h2.HEAD_BYTES))
                return kind, id, await self._reader.readexactly(high << 16 | low)
            except (asyncio.IncompleteReadError, ConnectionError):
                return -1, 0, b""

    async def until(self, wanted: int) -> bytes:
        """The body of the next frame of that type."""
        while (found := await self.frame())[0] not in (wanted, -1):
            pass
        assert found[0] == wanted
        return found[2]

    async def ends(self) -> bool:
        while (await self.frame())[0] != -1:
            pass
        return True
