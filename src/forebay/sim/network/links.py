"""What lies between two nodes: how long bytes take, how many fit through, and whether any arrive."""

from collections.abc import Iterable, Iterator
from math import inf
from random import Random
from typing import Final, NamedTuple

ANY: Final = "*"
"""Stands for every other node."""


class Shape(NamedTuple):
    """How bytes travel from one node to another; the same again the other way round."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """At most so much is added to the delay, evenly distributed and drawn for every piece."""
    bytes_per_s: float = inf
    """Shared by all connections between the two nodes, for each direction."""


AT_ONCE: Final = Shape()


class Link:
    """One direction between two nodes, as it is now."""

    __slots__ = ("_free_at", "_rng", "cut", "plain", "shape")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._free_at = 0.0
        self.cut = False
        """Nothing arrives; what is sent is kept and comes later, as TCP sends it again."""
        self.shape = AT_ONCE
        self.plain = True
        """Whether all arrives at once, so that nobody needs to ask when."""

    def become(self, shape: Shape) -> None:
        """Treat what is sent from now on like this."""
        if shape != self.shape:
            self.shape = shape
            self.plain = shape == AT_ONCE
            self._free_at = 0.0

    def arrival_s(self, now: float, size_bytes: int) -> float:
        """When a piece that is sent now has arrived: it queues for the bandwidth, then travels."""
        delay_s, jitter_s, bytes_per_s = self.shape
        self._free_at = left_at = max(now, self._free_at) + size_bytes / bytes_per_s
        return left_at + delay_s + (self._rng.random() * jitter_s if jitter_s else 0.0)


class Links:
    """All links, made when first asked for, and the rules by which they are what they are.

    A rule for two nodes goes before one for the first and `ANY`, that before one for `ANY` and the second, and that
    before one for all. A rule with `ANY` does not hold between a node and itself.
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
        """Undo `cut` for each (from, to); a pair that was cut by another rule stays so."""
        for pair in pairs:
            self._cuts.pop(pair, None)
        self._apply_all()

    def heal(self) -> None:
        """Forget all rules."""
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
