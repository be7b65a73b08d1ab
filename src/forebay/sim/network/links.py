"""The links between nodes: delay, bandwidth, and whether bytes arrive at all."""

from collections.abc import Iterable, Iterator
from math import inf
from random import Random
from typing import Final, NamedTuple

ANY: Final = "*"
"""Matches every other node."""


class Shape(NamedTuple):
    """Properties of one direction between two nodes."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Upper bound of uniform jitter, drawn per segment."""
    bytes_per_s: float = inf
    """Bandwidth, shared by all connections between the two nodes, per direction."""


AT_ONCE: Final = Shape()


class Link:
    """The current state of one direction between two nodes."""

    __slots__ = ("_free_at", "_rng", "cut", "plain", "shape")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._free_at = 0.0
        self.cut = False
        """Partitioned: data is kept and delivered later, as TCP retransmits it."""
        self.shape = AT_ONCE
        self.plain = True
        """Whether everything arrives immediately (fast path)."""

    def become(self, shape: Shape) -> None:
        """Use this shape for data sent from now on."""
        if shape != self.shape:
            self.shape = shape
            self.plain = shape == AT_ONCE
            self._free_at = 0.0

    def arrival_s(self, now: float, size_bytes: int) -> float:
        """Arrival time of a segment sent now: it queues for the bandwidth, then travels."""
        delay_s, jitter_s, bytes_per_s = self.shape
        self._free_at = left_at = max(now, self._free_at) + size_bytes / bytes_per_s
        return left_at + delay_s + (self._rng.random() * jitter_s if jitter_s else 0.0)


class Links:
    """All links, created on demand, and the rules for them.

    A rule for two nodes takes precedence over one for the first and `ANY`, then `ANY` and the second, then all. A
    rule with `ANY` does not apply between a node and itself.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._links: dict[tuple[str, str], Link] = {}
        self._shapes: dict[tuple[str, str], Shape] = {}
        self._cuts: dict[tuple[str, str], None] = {}

    def between(self, sender: str, receiver: str) -> Link:
        """The link from one node to another; always the same object."""
        key = sender, receiver
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = Link(self._rng)
            self._apply(key, link)
        return link

    def shape(self, a: str, b: str, shape: Shape) -> None:
        """Set the rule for a and b, in both directions."""
        self._shapes[a, b] = self._shapes[b, a] = shape
        self._apply_all()

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Let nothing arrive for each (from, to)."""
        self._cuts.update(dict.fromkeys(pairs))
        self._apply_all()

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undo `cut` for each (from, to); pairs cut by another rule stay cut."""
        for pair in pairs:
            self._cuts.pop(pair, None)
        self._apply_all()

    def heal(self) -> None:
        """Remove all rules."""
        self._shapes.clear()
        self._cuts.clear()
        self._apply_all()

    def _apply_all(self) -> None:
        for key, link in self._links.items():
            self._apply(key, link)

    def _apply(self, key: tuple[str, str], link: Link) -> None:
        link.cut = any(rule in self._cuts for rule in _rules(*key))
        link.become(next((self._shapes[rule] for rule in _rules(*key) if rule in self._shapes), AT_ONCE))


def _rules(sender: str, receiver: str) -> Iterator[tuple[str, str]]:
    yield sender, receiver
    if sender != receiver:
        yield sender, ANY
        yield ANY, receiver
        yield ANY, ANY
