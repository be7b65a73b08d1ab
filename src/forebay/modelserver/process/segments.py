"""Shared memory between two processes: memfds mapped at both ends, passed by file descriptor and reused.

The end that created a segment writes it, then lends it out with a packet (a *lease*); the other end reads it and
returns the lease when the last array or view of it is gone. Only then is the segment written again.
"""

import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

import numpy as np

ALIGN: Final = 64
"""Alignment of tensors in a segment, for vector instructions."""
SEGMENT_BYTES_MIN: Final = 1 << 16
SEGMENT_BYTES_MAX: Final = 1 << 36
KEPT_BYTES_MAX: Final = 256 << 20
"""Unused segments kept for reuse, in total. Sizes are powers of two; untouched pages take no memory."""
STAGED_BYTES_MIN: Final = 128 << 10
"""Smaller inputs cost less to copy than to map."""
STAGED_MAX: Final = 128
"""Segments for inputs in use at a time: each takes a descriptor and a mapping in every instance that has read it."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Shrinking a segment would crash its readers."""


class SegmentBroken(Exception):  # noqa: N818 - states the condition
    """A shared segment is invalid, or a batch is larger than any segment may be."""


class Sharing(IntEnum):
    """How the reading end maps a segment."""

    KNOWN = 0
    """It is already mapped."""
    BOTH = 1
    """Shared and writable: a model may reuse the memory of its inputs."""
    READ = 2
    PRIVATE = 3
    """Copy-on-write: writes are visible only to the reader, and only during its lease, since others read the same
    data.
    """


class Segment:
    """A segment and its mapping at this end. `fd` -1: closed."""

    __slots__ = ("__weakref__", "_leases", "_private", "fd", "id", "map", "size")

    def __init__(self, id: int, size: int, fd: int, sharing: Sharing = Sharing.BOTH) -> None:
        self.id = id
        self.size = size
        self.fd = -1
        self._private = sharing is Sharing.PRIVATE
        self._leases = 0
        writes = mmap.PROT_WRITE if sharing is not Sharing.READ else 0
        self.map = mmap.mmap(
            fd, size, mmap.MAP_PRIVATE if self._private else mmap.MAP_SHARED, mmap.PROT_READ | writes
        )
        self.fd = fd  # now it is closed with this

    def lease(self) -> None:
        """A reader takes a lease."""
        self._leases += 1

    def unlease(self) -> None:
        """A lease ends. After the last one, private changes are dropped, because the data may change."""
        self._leases -= 1
        if self._private and not self._leases:
            self.map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


def attach(id: int, size: int, fd: int, sharing: Sharing) -> Segment:
    """Map a segment that the other end has created; takes ownership of `fd`. Raises `SegmentBroken`."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < size:
            raise SegmentBroken("it is not sealed, or too short")
        return Segment(id, size, fd, sharing)
    except (OSError, ValueError, OverflowError, SegmentBroken) as error:
        os.close(fd)
        raise SegmentBroken(f"shared memory cannot be mapped: {error}") from error


class Pool:
    """The segments that this end writes. Not thread-safe: the channel locks."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._free: defaultdict[int, list[Segment]] = defaultdict(list)
        self._free_bytes = 0
        self._all: dict[int, Segment] = {}

    def take(self, size: int) -> tuple[Segment, bool]:
        """A segment of at least that size, and whether it is new to the other end. Raises `SegmentBroken`."""
        if size > SEGMENT_BYTES_MAX:
            raise SegmentBroken(f"{size} bytes are more than the limit of {SEGMENT_BYTES_MAX} for one batch")
        bytes_needed = max(SEGMENT_BYTES_MIN, 1 << (size - 1).bit_length())
        if free := self._free[bytes_needed]:
            self._free_bytes -= bytes_needed
            return free.pop(), False  # the last one used: its pages are still cached
        fd = os.memfd_create("forebay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, bytes_needed)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            segment = Segment(next(self._ids), bytes_needed, fd)
        except BaseException:
            os.close(fd)
            raise
        self._all[segment.id] = segment
        return segment, True

    def give_back(self, segment: Segment) -> bool:
        """The other end has read it. False: it was dropped, and the other end should forget it."""
        if self._free_bytes + segment.size > KEPT_BYTES_MAX:
            segment.close()
            del self._all[segment.id]
            return False
        self._free[segment.size].append(segment)
        self._free_bytes += segment.size
        return True

    def close(self) -> None:
        """Close all segments."""
        for segment in self._all.values():
            segment.close()
        self._all.clear()
        self._free.clear()


class Forgotten:
    """Segments that the other end is to forget: until then its mapping keeps their memory."""

    __slots__ = ("ids", "on_more")

    def __init__(self) -> None:
        self.ids: deque[int] = deque()
        self.on_more: Callable[[], object] | None = None
        """Called in any thread when there are more; without it the next packet names them."""

    def add(self, id: int) -> None:
        """There is one more."""
        self.ids.append(id)
        on_more = self.on_more
        if on_more is not None:
            on_more()


class Root(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of one lease: every array and view of them is based on this, which keeps the lease alive."""

    segment: Segment | None
    """None: the data came inside the packet."""


class Borrowed(weakref.ref[Root]):
    """Notices when the last reference to borrowed data is gone."""

    __slots__ = ("lease", "segment", "size")
    lease: int
    segment: Segment | None
    """None: the data came inside the packet."""
    size: int


def root(buffer: mmap.mmap | bytearray, size: int, segment: Segment | None) -> Root:
    """A root over the first `size` bytes of a buffer."""
    made = Root((size,), np.uint8, buffer)
    made.segment = segment
    return made


class _Staged(weakref.ref[Root]):
    """Notices when nobody refers to staged data any more."""

    __slots__ = ("segment",)
    segment: Segment


class Staging:
    """Memory for large inputs while they arrive: the models' processes map it, so that they need no copy.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = Pool(itertools.count(1))
        self._used: dict[int, _Staged] = {}
        """By the id of the segment."""
        self._over: deque[_Staged] = deque()

    def take(self, size: int, aligned_at: int = 0) -> memoryview | None:
        """Memory of that size, in use until the last view of it is gone; what lies at `aligned_at` is aligned.

        None: the input is too small or too large for it, or there is none at the moment.
        """
        if not STAGED_BYTES_MIN <= size <= SEGMENT_BYTES_MAX - ALIGN:
            return None
        with self._lock:
            view = self._take(size, -aligned_at % ALIGN)
        self._give_back()
        return view

    def _take(self, size: int, start: int) -> memoryview | None:
        if len(self._used) >= STAGED_MAX:
            return None
        try:
            segment, _ = self._pool.take(start + size)
        except OSError:  # out of descriptors, or of memory
            return None
        made = root(segment.map, start + size, segment)
        staged = _Staged(made, self._ended)
        staged.segment = segment
        self._used[segment.id] = staged
        return made.data[start:]

    def _ended(self, staged: weakref.ref[Root]) -> None:
        """The last view is gone. Called in whichever thread dropped it, even in the middle of `take`."""
        assert isinstance(staged, _Staged)
        self._over.append(staged)
        self._give_back()

    def _give_back(self) -> None:
        while self._over and self._lock.acquire(blocking=False):  # whoever has it looks again afterwards
            try:
                if self._over:
                    segment = self._over.popleft().segment
                    del self._used[segment.id]
                    self._pool.give_back(segment)
            finally:
                self._lock.release()


def where(view: memoryview) -> tuple[Segment, int] | None:
    """The segment and offset of a non-empty view; None: other memory."""
    base: object = view.obj
    if type(base) is not Root or base.segment is None or not view.c_contiguous:
        return None
    return base.segment, np.frombuffer(view, np.uint8).ctypes.data - base.ctypes.data
