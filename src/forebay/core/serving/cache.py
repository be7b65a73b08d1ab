"""An LRU cache with a byte budget, for responses by request hash."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 256
"""Overhead of an entry besides its content; without it any number of empty ones would fit."""


class ByteLru(Generic[K, V]):
    """Entries with sizes. Keys must include the load of the model, else entries outlive it.

    `used_bytes` never exceeds `bytes_max`; `evictions` counts evicted entries; callers count `hits` and
    `misses`, and the time that lookups and insertions take.
    """

    __slots__ = (
        "_entries", "bytes_max", "evictions", "hits", "insertion_ns", "lookup_ns", "misses", "used_bytes",
    )  # fmt: skip

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.evictions = self.hits = self.misses = 0
        self.lookup_ns = self.insertion_ns = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of the key, which becomes the most recently used; None: absent."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> bool:
        """Store the value, replacing the key's old one. False: it exceeds the whole budget and is not stored."""
        self.drop(key)
        size_bytes += ENTRY_BYTES
        if size_bytes > self.bytes_max:
            return False
        while self.used_bytes + size_bytes > self.bytes_max:
            self.used_bytes -= self._entries.popitem(last=False)[1][1]
            self.evictions += 1
        self._entries[key] = (value, size_bytes)
        self.used_bytes += size_bytes
        return True

    def drop(self, key: K) -> None:
        """Remove an entry; unknown keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry[1]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.used_bytes = 0
