"""An in-memory client of a session: it writes valid or invalid frames and reads the responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpack import Decoder, Encoder

from forebay.wire.http2 import frames as h2
from forebay.wire.http2.headers import Header, well_formed
from forebay.wire.http2.session import Session
from forebay.wire.http2.streams import Stream

REQUEST: tuple[Header, ...] = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"x"), (b"te", b"trailers"),
)  # fmt: skip
START = h2.PREFACE + h2.settings({})


@dataclass
class Served:
    """A request as its server sees it."""

    session: "Session[Sequence[Header]]"
    stream: Stream
    headers: Sequence[Header]
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    resets: int = 0

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        assert not self.ended
        self.data += data
        self.ended = ended

    def on_reset(self) -> None:
        self.resets += 1

    def answer(self, data: bytes = b"fine") -> None:
        self.session.answer(self.stream, b"\x88", data, b"\x8c")


class Peer:
    """A client, and the server that it talks to."""

    def __init__(self, *, start: bytes = START) -> None:
        self.encoder = Encoder()
        self.served: list[Served] = []
        self.session: Session[Sequence[Header]] = Session(_read, self._begin)
        self.decoder = Decoder()
        self.sent = bytearray()
        """What the server has sent, whole frames left out."""
        if start:
            self.send(start)
            self.frames()

    def _begin(self, session: "Session[Sequence[Header]]", stream: Stream, headers: Sequence[Header]) -> Served:
        self.served.append(Served(session, stream, headers))
        return self.served[-1]

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.session.receive(part)

    def ask(self, id: int = 1, data: bytes = b"ask", headers: Sequence[Header] = REQUEST) -> Served:
        """A whole request."""
        self.send(request(id, self.encoder.encode(headers), data))
        return self.served[-1]

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Type, flags, stream and body of what has come since the last look."""
        self.sent += b"".join(self.session.out)
        self.session.out.clear()
        found = []
        while len(self.sent) >= h2.HEAD_BYTES:
            high, low, kind, flags, id = h2.HEAD.unpack_from(self.sent)
            end = h2.HEAD_BYTES + (high << 16 | low)
            assert len(self.sent) >= end
            found.append((kind, flags, id, bytes(self.sent[h2.HEAD_BYTES : end])))
            del self.sent[:end]
        return found

    def answered(self, id: int) -> bytes:
        """The data of a stream that has come since the last look."""
        return b"".join(body for kind, _, stream, body in self.frames() if (kind, stream) == (h2.DATA, id))

    def goodbye(self) -> int | None:
        """The code of the GOAWAY that has come, if one has."""
        codes = [h2.U32.unpack_from(body, 4)[0] for kind, _, _, body in self.frames() if kind == h2.GOAWAY]
        assert len(codes) <= 1
        return codes[0] if codes else None


def _read(headers: Sequence[Header]) -> Sequence[Header] | None:
    return headers if well_formed(headers) else None


def request(id: int, block: bytes, data: bytes) -> bytes:
    """HEADERS and DATA."""
    parts = [data[at : at + h2.FRAME_BYTES_MAX] for at in range(0, len(data), h2.FRAME_BYTES_MAX)] or [b""]
    flags = [0] * (len(parts) - 1) + [h2.END_STREAM]
    frames = [h2.frame(h2.DATA, flag, id, part) for part, flag in zip(parts, flags, strict=True)]
    return h2.frame(h2.HEADERS, h2.END_HEADERS, id, block) + b"".join(frames)


def window(id: int, more: int) -> bytes:
    """WINDOW_UPDATE."""
    return h2.frame(h2.WINDOW_UPDATE, 0, id, h2.U32.pack(more))


def reset(id: int, code: int = 8) -> bytes:
    """RST_STREAM."""
    return h2.frame(h2.RST_STREAM, 0, id, h2.U32.pack(code))
