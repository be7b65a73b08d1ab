"""One end of a channel between server and child: packets on a SOCK_SEQPACKET pair, tensors beside them.

A packet is `data | head and message (msgpack) | length of those, 4 bytes`. Little data travels within the packet,
more of it in a shared segment whose descriptor goes along the first time. A packet larger than the socket takes goes
through a file in memory of its own. Data that the other end reads is *lent*: see `segments`.
"""

import array
import itertools
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import msgspec

from forebay.core.serving.values import Buffer
from forebay.modelserver.process.messages import WITHIN, Head, Part, ToChild, ToServer, packets_with
from forebay.modelserver.process.segments import (
    Borrowed,
    Pool,
    Root,
    Segment,
    SegmentBroken,
    Sharing,
    attach,
    root,
)

INLINE_BYTES_MAX: Final = 64 << 10
"""Of a batch's data: more goes through a segment."""
PACKET_BYTES_MAX: Final = 128 << 10
"""What a socket with Linux's default buffer certainly takes at once."""
SPILLED: Final = 0xFFFF_FFFF
SPILLED_BYTES_MAX: Final = 256 << 20
"""Of a packet without its segments: descriptions of tensors, and little data."""
FDS_MAX: Final = 128
"""With one packet; the kernel takes 253. Data of more segments than that is copied."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE((FDS_MAX + 2) * array.array("i").itemsize)
TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
LENGTH_BYTES: Final = 4
ALIGN_WITHIN: Final = 16
"""Of tensors within a packet: what an allocator gives."""
ALIGN: Final = 64
"""Of tensors in a segment: what vector instructions like."""
LENT_BYTES_MAX: Final = 16 << 20
"""Of responses that are sent bit by bit: a model that has so much unread waits before it sends more."""
LENT_COST_BYTES_MIN: Final = 1 << 10
"""What a response counts at least."""

M = TypeVar("M", bound=ToChild | ToServer)


class ChannelBroken(Exception):  # noqa: N818 - states the condition
    """What the other end sent cannot be read."""


class _Lent(NamedTuple):
    own: Segment | None
    keep: memoryview | None
    """Of another child's segment: holds on to it until it is returned."""
    cost_bytes: int


class Parcel:
    """Data on its way into a packet. Made with enough room for all that will be put; then `put` or `refer` to it."""

    __slots__ = ("_referred", "chunks", "fds", "held", "offset", "own", "parts")

    def __init__(self, own: Segment | None, part: Part | None, held: bool) -> None:
        self.own = own
        self.chunks: list[Buffer] = []
        """The data that goes within the packet."""
        self._referred: dict[Segment, int] = {}
        self.parts = [part] if part is not None else []
        self.fds = [own.fd] if own is not None and part is not None and part.sharing else []
        self.offset = 0
        self.held = held
        """Whether data within the packet is lent as well."""

    def put(self, data: Buffer, size: int, *, align: bool = True) -> tuple[int, int]:
        """Copy data: the part and offset where it lies. Without `align` it follows what was put before."""
        own = self.own
        offset = self.offset
        if align:
            step = ALIGN_WITHIN if own is None else ALIGN
            if padding := -offset % step:
                offset += padding
                if own is None:
                    self.chunks.append(bytes(padding))
        self.offset = offset + size
        if own is None:
            self.chunks.append(data)
            return WITHIN, offset
        own.map[offset : offset + size] = data
        return 1, offset

    def refer(self, segment: Segment, lend: Callable[[], Part]) -> int:
        """The number of the part that another child's segment is; `lend` makes it."""
        number = self._referred.get(segment)
        if number is None:
            part = lend()
            self.parts.append(part)
            number = self._referred[segment] = len(self.parts)
            if part.sharing:
                self.fds.append(segment.fd)
        return number


class Received(Generic[M]):
    """A packet that came: its message, its parts, and descriptors that belong to the message."""

    __slots__ = ("fds", "message", "parts")

    def __init__(self, message: M, parts: list[memoryview], fds: list[int]) -> None:
        self.message: M = message
        self.parts = parts
        self.fds = fds


class Channel(Generic[M]):
    """One end; `M` is what it receives. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, receives: Any, sharing: Sharing) -> None:
        """`receives` is the type `M`, `sharing` what the other end may do with segments of this end."""
        self.socket = sock
        self._sharing = sharing
        self._decode = packets_with(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = memoryview(bytearray(PACKET_BYTES_MAX))
        self._lock = threading.Condition(threading.Lock())
        self._numbers = itertools.count(1)
        self._pool = Pool(self._numbers)
        self._lent: dict[int, _Lent] = {}
        self._lent_bytes = 0
        self._foreign: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()
        self._forgotten: deque[int] = deque()
        self._attached: dict[int, Segment] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._returns: deque[int] = deque()
        self._closed = False
        self.on_return: Callable[[], object] | None = None
        """Hears, in any thread, that there are leases to give back; without it they wait for the next packet."""

    def parcel(self, size: int, *, held: bool = False) -> Parcel:
        """A parcel for that many bytes, alignment included. With `held` data within the packet is lent as well.

        Raises `SegmentBroken`: there is no memory for that much.
        """
        if size <= INLINE_BYTES_MAX:
            return Parcel(None, None, held)
        with self._lock:
            own, new = self._pool.take(size)
        lease = next(self._numbers)
        return Parcel(own, Part(lease, own.id, own.size, self._sharing if new else Sharing.KNOWN), held)

    def refer(self, parcel: Parcel, segment: Segment, view: memoryview) -> int:
        """The number of the part for a segment that another child has lent us; `view` looks into it."""
        return parcel.refer(segment, lambda: self._refer(segment, view))

    def _refer(self, segment: Segment, view: memoryview) -> Part:
        id = self._foreign.get(segment)
        new = id is None
        if id is None:
            id = self._foreign[segment] = next(self._numbers)
            weakref.finalize(segment, self._forgotten.append, id).atexit = False
        lease = next(self._numbers)
        self._lent[lease] = _Lent(None, view, 0)
        return Part(lease, id, segment.size, Sharing.PRIVATE if new else Sharing.KNOWN)

    def pack(self, message: ToChild | ToServer, parcel: Parcel | None = None) -> tuple[bytes, list[int]]:
        """The packet, to be sent once, and the descriptors that go with it."""
        parts: tuple[Part, ...] = ()
        chunks: list[Buffer] = []
        fds: list[int] = []
        lease = 0
        if parcel is not None:
            parts, chunks, fds = tuple(parcel.parts), parcel.chunks, parcel.fds
            cost_bytes = max(parcel.offset, LENT_COST_BYTES_MIN) if parcel.held else 0
            if parcel.own is not None:
                self._lend(parts[0].lease, parcel.own, cost_bytes)
            elif parcel.held:
                lease = next(self._numbers)
                self._lend(lease, None, cost_bytes)
        head = Head(parts, lease, _drained(self._returns), _drained(self._forgotten))
        described = self._encoder.encode((head, message))
        return b"".join((*chunks, described, len(described).to_bytes(LENGTH_BYTES, "big"))), fds

    def _lend(self, lease: int, own: Segment | None, cost_bytes: int) -> None:
        with self._lock:
            self._lent[lease] = _Lent(own, None, cost_bytes)
            self._lent_bytes += cost_bytes

    def send(self, packet: bytes, fds: list[int]) -> None:
        """Send a packet. Raises OSError, and BlockingIOError on a socket that does not block."""
        if len(packet) > PACKET_BYTES_MAX:
            self._spill(packet, fds)
        elif fds:
            self._send(packet, fds)
        else:
            self.socket.send(packet)

    def _send(self, packet: bytes, fds: list[int]) -> None:
        self.socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])

    def _spill(self, packet: bytes, fds: list[int]) -> None:
        fd = os.memfd_create("forebay", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(packet)
            self._send(SPILLED.to_bytes(LENGTH_BYTES, "big"), [fd, *fds])
        finally:
            os.close(fd)

    def receive(self) -> Received[M]:
        """The next packet. Raises `ChannelBroken`, EOFError, OSError, and BlockingIOError if the socket is such."""
        size, ancillary, flags, _ = self.socket.recvmsg_into([self._buffer], ANCILLARY_BYTES, CLOEXEC)
        fds = _descriptors(ancillary) if ancillary else []
        if not size:
            raise EOFError
        try:
            if flags & TRUNCATED:
                raise ChannelBroken("a packet that is too long, or more descriptors than this process may have")
            return self._read(bytearray(self._buffer[:size]), fds)
        except (msgspec.MsgspecError, SegmentBroken, IndexError, KeyError, ValueError) as error:
            for fd in fds:
                os.close(fd)
            raise ChannelBroken(str(error)) from error

    def _read(self, packet: bytearray, fds: list[int]) -> Received[M]:
        length = int.from_bytes(packet[-LENGTH_BYTES:], "big")
        if length == SPILLED:
            packet = _unspilled(fds.pop(0))
            length = int.from_bytes(packet[-LENGTH_BYTES:], "big")
        end = len(packet) - LENGTH_BYTES
        parts = [memoryview(packet)]
        head, message = self._decode(parts[0][end - length : end])
        if head.returned:
            self.take_back(head.returned)
        for id in head.forgotten:
            self._attached.pop(id).close()
        if head.lease:
            parts[0] = self._borrow(root(packet, end - length, None), head.lease)
        for lease, id, size, sharing in head.parts:
            if sharing:
                self._attached[id] = attach(id, size, fds.pop(0), sharing)
            segment = self._attached[id]
            parts.append(self._borrow(root(segment.map, segment.size, segment), lease))
        return Received(cast(M, message), parts, fds)

    def _borrow(self, lent: Root, lease: int) -> memoryview:
        ref = Borrowed(lent, self._over)
        ref.lease = lease
        ref.size = lent.size
        ref.segment = lent.segment
        if ref.segment is not None:
            ref.segment.lease()
        self._borrowed[lease] = ref
        return lent.data

    def _over(self, ref: weakref.ref[Root]) -> None:
        """Nothing refers to borrowed data any more. Called wherever the last reference went: in any thread."""
        assert isinstance(ref, Borrowed)
        lease, segment = ref.lease, ref.segment
        if segment is not None:
            segment.unlease()
        del self._borrowed[lease]  # the last reference to `ref`, if this is compiled: its caller holds none
        self._returns.append(lease)
        if self.on_return is not None and not self._closed:
            self.on_return()

    def returns(self) -> tuple[int, ...]:
        """The leases to give back, for a message; they do not go with the next packet then."""
        return _drained(self._returns)

    @property
    def borrowed_bytes(self) -> int:
        """How much of what came is still referred to."""
        return sum(ref.size for ref in list(self._borrowed.values()))

    def take_back(self, leases: Iterable[int]) -> None:
        """The other end does not read that any more. Raises KeyError if it was not lent."""
        with self._lock:
            if self._closed:
                return
            for lease in leases:
                own, _, cost_bytes = self._lent.pop(lease)
                self._lent_bytes -= cost_bytes
                if own is not None and not self._pool.give_back(own):
                    self._forgotten.append(own.id)
            self._lock.notify_all()

    def wait_for_credit(self) -> None:
        """Wait until the other end has read enough of what was lent to it with `held`."""
        with self._lock:
            while self._lent_bytes > LENT_BYTES_MAX and not self._closed:
                self._lock.wait()

    def close(self) -> None:
        """End it. Borrowed data stays readable for as long as it is referred to."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            self._pool.close()
        self._lent.clear()
        for segment in self._attached.values():
            segment.close()
        self._attached.clear()
        self.socket.close()


def _drained(numbers: deque[int]) -> tuple[int, ...]:
    if not numbers:
        return ()
    taken = []
    while numbers:  # others append meanwhile
        taken.append(numbers.popleft())
    return tuple(taken)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _unspilled(fd: int) -> bytearray:
    with open(fd, "rb"):
        size = os.fstat(fd).st_size
        if not LENGTH_BYTES < size <= SPILLED_BYTES_MAX:
            raise ChannelBroken(f"a packet of {size} bytes")
        packet = bytearray(size)
        os.preadv(fd, [packet], 0)
    return packet
