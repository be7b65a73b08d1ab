"""System shared memory that clients have registered: inputs are read from it, and outputs written to it.

Clients own the memory and may shrink it at any time; touching a mapping would then kill the server (SIGBUS). So it is
never mapped, but read and written like a file, each time within its current size.
"""

import os
import stat
from collections.abc import Sequence
from typing import Final

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer
from forebay.modelserver.process.segments import Staging
from forebay.wire.oip.fields import invalid
from forebay.wire.oip.ports import MemoryKind, Region

FOLDER: Final = "/dev/shm"  # noqa: S108 - it is where shm_open keeps its objects
READ_BYTES_MAX: Final = 1 << 30
"""Limit of one input in shared memory: copying it blocks the event loop."""
REGIONS_MAX: Final = 4096
"""Each keeps a file open."""
RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
"""Key prefix that Triton reserves for itself and rejects for clients."""
NO_CUDA: Final = "CUDA shared memory is not supported: this server reads and writes tensors in system memory only"


class Target:
    """The part of a region that an output is written to."""

    __slots__ = ("_at", "_held", "size")

    def __init__(self, held: "_Held", at: int, size: int) -> None:
        self._held = held
        self._at = at
        self.size = size
        """Bytes available."""

    def put(self, output: str, data: Buffer) -> None:
        """Write an output there. Raises `Refused`, also if it does not fit."""
        view = memoryview(data).cast("B")
        if len(view) > self.size:
            raise invalid(
                f"shared memory size specified with the request for output '{output}' ({self.size} bytes) should be "
                f"at least {len(view)} bytes to hold the results"
            )
        if view:
            self._held.write(self._at, view)


class _Held:
    """A registered region. It stays open while requests use it, even if it is unregistered."""

    __slots__ = ("_file", "known")

    def __init__(self, known: Region, file: int) -> None:
        self.known = known
        self._file = file

    def __del__(self) -> None:
        os.close(self._file)

    def check(self, at: int, size: int) -> None:
        """Check that a range lies within the region and its memory's current size. Raises `Refused`."""
        name = self.known.name
        if at >= self.known.size:
            raise Refused(Kind.INVALID_ARGUMENT, f"Invalid offset for shared memory region: '{name}'")
        if at + size > self.known.size:
            raise Refused(Kind.INVALID_ARGUMENT, f"Invalid offset + byte size for shared memory region: '{name}'")
        if self.known.offset + at + size > os.fstat(self._file).st_size:
            raise self._shrunk()

    def read(self, at: int, size: int, staging: Staging | None) -> memoryview:
        """A copy of a range."""
        self.check(at, size)
        if size > READ_BYTES_MAX:
            raise invalid(
                f"an input of {size} bytes in shared memory region '{self.known.name}' is over {READ_BYTES_MAX} bytes"
            )
        room = staging.take(size) if staging is not None else None
        if room is not None:
            done = 0
            while done < size:
                count = os.preadv(self._file, [room[done:]], self.known.offset + at + done)
                if not count:
                    raise self._shrunk()
                done += count
            return room
        parts = []
        while size:
            part = os.pread(self._file, size, self.known.offset + at)  # all of it, unless a signal interrupts
            if not part:
                raise self._shrunk()
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def write(self, at: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        self.check(at, len(data))  # a write beyond the end would grow the memory
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self.known.offset + at + done)
        except OSError as error:  # the client has sized it, but the folder is full
            text = f"shared memory region '{self.known.name}' cannot be written: {error.strerror}"
            raise Refused(Kind.UNAVAILABLE, text) from None

    def _shrunk(self) -> Refused:
        text = f"shared memory region '{self.known.name}' is no longer as large as it was registered"
        return Refused(Kind.INVALID_ARGUMENT, text)


class SharedRegions:
    """The registered regions. Implements `wire.oip.ports.Regions`; everything raises `Refused`."""

    def __init__(self, folder: str = FOLDER, staging: Staging | None = None) -> None:
        self._folder = folder
        self.staging = staging
        self._known: dict[str, _Held] = {}

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """A copy of the current content."""
        return self._held(name).read(offset, size, self.staging)

    def target(self, name: str, offset: int, size: int) -> Target:
        """A destination for an output."""
        held = self._held(name)
        held.check(offset, size)
        return Target(held, offset, size)

    def register(self, region: Region) -> None:
        """Register a region."""
        if region.kind is MemoryKind.CUDA:
            raise Refused(Kind.UNSUPPORTED, NO_CUDA)
        name = region.name
        key = _key(region)
        if name in self._known:
            raise Refused(Kind.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._known) >= REGIONS_MAX:
            raise Refused(Kind.UNAVAILABLE, f"failed to register shared memory region '{name}': too many regions")
        held = _Held(region, self._open(region.key, key))
        if region.size == 0:
            text = f"failed to register shared memory region '{name}': unable to process address space"
            raise Refused(Kind.INVALID_ARGUMENT, text + "Invalid argument")
        try:
            held.check(0, region.size)
        except Refused:
            text = f"failed to register shared memory region '{name}': invalid args"
            raise Refused(Kind.INVALID_ARGUMENT, text) from None
        self._known[name] = held

    def unregister(self, kind: MemoryKind, name: str) -> None:
        """Unregister a region, or all of that kind if `name` is empty. Unknown names are ignored."""
        if kind is MemoryKind.SYSTEM:
            for each in [name] if name else list(self._known):
                self._known.pop(each, None)

    def status(self, kind: MemoryKind, name: str) -> Sequence[Region]:
        """One region, or all of that kind if `name` is empty."""
        if not name:
            return [self._known[each].known for each in sorted(self._known)] if kind is MemoryKind.SYSTEM else []
        if name not in self._known:
            what = "cuda" if kind is MemoryKind.CUDA else "system"
            raise Refused(Kind.NOT_FOUND, f"Unable to find {what} shared memory region: '{name}'")
        if kind is MemoryKind.CUDA:
            text = f"The region named '{name}' is registered as system shared memory, not CUDA shared memory"
            raise Refused(Kind.NOT_FOUND, text)
        return [self._known[name].known]

    def _held(self, name: str) -> _Held:
        held = self._known.get(name)
        if held is None:
            raise Refused(Kind.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        return held

    def _open(self, shown: str, key: str) -> int:
        """Open the object of a key, which must be a regular file directly in the folder."""
        failed = Refused(Kind.INTERNAL, f"Unable to open shared memory region: '{shown}'")
        if "/" in key or "\0" in key or key in (".", ".."):
            raise failed
        try:
            file = os.open(f"{self._folder}/{key}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            raise failed from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise failed
        return file


def _key(region: Region) -> str:
    """The key without leading slashes, as in shm_open."""
    key = region.key.lstrip("/")
    if not key:
        text = f"cannot register shared memory region '{region.name}' - invalid shm key '{region.key}'"
        raise Refused(Kind.INVALID_ARGUMENT, text)
    if key.startswith(RESERVED_PREFIX):
        text = (
            f"cannot register shared memory region '{region.name}' with key '{region.key}' as the key contains the "
            f"reserved prefix '{RESERVED_PREFIX}'"
        )
        raise Refused(Kind.INVALID_ARGUMENT, text)
    return key
