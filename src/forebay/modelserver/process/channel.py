"""One end of a channel between server and child: packets on a SOCK_SEQPACKET pair, plus shared memory for tensors.

A packet is `data | head and message (msgpack) | length of the latter, 4 bytes`. Small data travels in the packet,
larger data in a shared segment whose descriptor is sent along the first time. A packet too large for the socket goes
through a memfd of its own. Data that the other end may still read is *lent*: see `segments`.
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
    ALIGN,
    Borrowed,
    Forgotten,
    Pool,
    Root,
    Segment,
    SegmentBroken,
    Sharing,
    attach,
    root,
)

INLINE_BYTES_MAX: Final = 64 << 10
"""Data of a batch up to this size travels in the packet, more goes through a segment."""
PACKET_BYTES_MAX: Final = 128 << 10
"""Fits into a socket with Linux's default buffer size."""
SPILLED: Final = 0xFFFF_FFFF
SPILLED_BYTES_MAX: Final = 256 << 20
"""Limit of a packet without its segments: tensor descriptions and small data."""
FDS_MAX: Final = 128
"""Descriptors per packet; the kernel allows 253. Data of further segments is copied."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE((FDS_MAX + 2) * array.array("i").itemsize)
TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
LENGTH_BYTES: Final = 4
ALIGN_WITHIN: Final = 16
"""Alignment of tensors in a packet, as allocators guarantee."""
LENT_BYTES_MAX: Final = 16 << 20
"""Limit of unread streamed responses: the model blocks before it sends more."""
LENT_COST_BYTES_MIN: Final = 1 << 10
"""Minimum that a response counts towards LENT_BYTES_MAX."""

M = TypeVar("M", bound=ToChild | ToServer)


class ChannelBroken(Exception):  # noqa: N818 - states the condition
    """The other end sent a packet that cannot be decoded."""


class _Lent(NamedTuple):
    own: Segment | None
    keep: memoryview | None
    """Keeps another child's segment leased until this is returned."""
    cost_bytes: int


class _Foreign(NamedTuple):
    """A segment of another child that the other end knows."""

    id: int
    end: "weakref.finalize[..., Segment]"
    """Tells the other end to forget it."""


class Parcel:
    """Data of an outgoing packet. Create it with enough room for everything; then `put` or `refer`."""

    __slots__ = ("_referred", "chunks", "fds", "held", "offset", "own", "parts")

    def __init__(self, own: Segment | None, part: Part | None, held: bool) -> None:
        self.own = own
        self.chunks: list[Buffer] = []
        """Data that travels in the packet."""
        self._referred: dict[Segment, int] = {}
        self.parts = [part] if part is not None else []
        self.fds = [own.fd] if own is not None and part is not None and part.sharing else []
        self.offset = 0
        self.held = held
        """Whether data in the packet is lent as well."""

    def put(self, data: Buffer, size: int, *, align: bool = True) -> tuple[int, int]:
        """Copy data; returns its part and offset. Without `align` it directly follows the data put before."""
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
        """The part number for another child's segment; `lend` creates the part on first use."""
        number = self._referred.get(segment)
        if number is None:
            part = lend()
            self.parts.append(part)
            number = self._referred[segment] = len(self.parts)
            if part.sharing:
                self.fds.append(segment.fd)
        return number


class Received(Generic[M]):
    """A received packet: message, parts, and the descriptors that belong to the message."""

    __slots__ = ("fds", "message", "parts")

    def __init__(self, message: M, parts: list[memoryview], fds: list[int]) -> None:
        self.message: M = message
        self.parts = parts
        self.fds = fds


class Channel(Generic[M]):
    """One end; it receives messages of type `M`. Any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket, receives: Any, sharing: Sharing) -> None:
        """`receives` is the type `M`; `sharing` is how the other end may map segments of this end."""
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
        self._foreign: weakref.WeakKeyDictionary[Segment, _Foreign] = weakref.WeakKeyDictionary()
        self.forgotten = Forgotten()
        self._attached: dict[int, Segment] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._returns: deque[int] = deque()
        self._closed = False
        self.on_return: Callable[[], object] | None = None
        """Called in any thread when there are leases to return; without it they wait for the next packet."""

    def parcel(self, size: int, *, held: bool = False) -> Parcel:
        """A parcel for that many bytes, alignment included. With `held`, data in the packet is lent as well.

        Raises `SegmentBroken` if it is larger than any segment.
        """
        if size <= INLINE_BYTES_MAX:
            return Parcel(None, None, held)
        with self._lock:
            own, new = self._pool.take(size)
        lease = next(self._numbers)
        return Parcel(own, Part(lease, own.id, own.size, self._sharing if new else Sharing.KNOWN), held)

    def refer(self, parcel: Parcel, segment: Segment, view: memoryview) -> int:
        """The part number for a segment that another child has lent us; `view` lies in it."""
        return parcel.refer(segment, lambda: self._refer(segment, view))

    def _refer(self, segment: Segment, view: memoryview) -> Part:
        known = self._foreign.get(segment)
        new = known is None
        if known is None:
            id = next(self._numbers)
            known = self._foreign[segment] = _Foreign(id, weakref.finalize(segment, self.forgotten.add, id))
            known.end.atexit = False
        lease = next(self._numbers)
        self._lent[lease] = _Lent(None, view, 0)
        return Part(lease, known.id, segment.size, Sharing.PRIVATE if new else Sharing.KNOWN)

    def pack(self, message: ToChild | ToServer, parcel: Parcel | None = None) -> tuple[bytes, list[int]]:
        """Encode a packet, to be sent exactly once, with the descriptors to send along."""
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
        head = Head(parts, lease, _drained(self._returns), _drained(self.forgotten.ids))
        described = self._encoder.encode((head, message))
        return b"".join((*chunks, described, len(described).to_bytes(LENGTH_BYTES, "big"))), fds

    def _lend(self, lease: int, own: Segment | None, cost_bytes: int) -> None:
        with self._lock:
            self._lent[lease] = _Lent(own, None, cost_bytes)
            self._lent_bytes += cost_bytes

    def send(self, packet: bytes, fds: list[int]) -> None:
        """Send a packet. Raises OSError; BlockingIOError on a non-blocking socket."""
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
        """The next packet. Raises `ChannelBroken`, EOFError, OSError; BlockingIOError on a non-blocking socket."""
        size, ancillary, flags, _ = self.socket.recvmsg_into([self._buffer], ANCILLARY_BYTES, CLOEXEC)
        fds = _descriptors(ancillary) if ancillary else []
        if not size:
            raise EOFError
        try:
            if flags & TRUNCATED:
                raise ChannelBroken("packet too long, or more descriptors than this process may open")
            return self._read(bytearray(self._buffer[:size]), fds)
        except (ChannelBroken, msgspec.MsgspecError, SegmentBroken, IndexError, KeyError, ValueError) as error:
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
                segment = self._attached[id] = attach(id, size, fds.pop(0), sharing)
                if sharing is not Sharing.READ:  # a child passes no segments of others on: its mapping is enough
                    segment.close()
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
        """The last reference to borrowed data is gone. Called in whichever thread dropped it."""
        assert isinstance(ref, Borrowed)
        lease, segment = ref.lease, ref.segment
        if segment is not None:
            segment.unlease()
        del self._borrowed[lease]  # the last reference to `ref` in compiled code, whose caller holds none
        self._returns.append(lease)
        if self.on_return is not None and not self._closed:
            self.on_return()

    def returns(self) -> tuple[int, ...]:
        """Take the leases to return, to send them in a message instead of with the next packet."""
        return _drained(self._returns)

    @property
    def borrowed_bytes(self) -> int:
        """Size of received data that is still referenced."""
        return sum(ref.size for ref in list(self._borrowed.values()))

    def take_back(self, leases: Iterable[int]) -> None:
        """Accept returned leases. Raises KeyError for an unknown one."""
        with self._lock:
            if self._closed:
                return
            for lease in leases:
                own, _, cost_bytes = self._lent.pop(lease)
                self._lent_bytes -= cost_bytes
                if own is not None and not self._pool.give_back(own):
                    self.forgotten.add(own.id)
            self._lock.notify_all()

    def wait_for_credit(self) -> None:
        """Block until the other end has returned enough of what was lent with `held`."""
        with self._lock:
            while self._lent_bytes > LENT_BYTES_MAX and not self._closed:
                self._lock.wait()

    def close(self) -> None:
        """Close the channel. Borrowed data stays readable while referenced."""
        with self._lock:
            self._closed = True
            self.forgotten.on_more = None
            self._lock.notify_all()
            self._pool.close()
        self._lent.clear()
        for foreign in list(self._foreign.values()):
            foreign.end.detach()  # such a segment may live as long as the server
        self._foreign.clear()
        for segment in self._attached.values():
            segment.close()
        self._attached.clear()
        self.socket.close()


def _drained(numbers: deque[int]) -> tuple[int, ...]:
    if not numbers:
        return ()
    taken = []
    while numbers:  # other threads append concurrently
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
