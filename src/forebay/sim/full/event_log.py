"""The event log of a simulated cluster: a hash of all events, and violated invariants."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

VIOLATIONS_MAX: Final = 50
"""Most violations that are kept."""
TAIL_MAX: Final = 400
"""Latest events that are kept as text."""


class Disturbance(NamedTuple):
    """A fault that may break connections of a node."""

    at: float
    node: str
    what: str


class EventLog:
    """The log of one run. `now` returns virtual time once there is a loop."""

    def __init__(self, now: Callable[[], float] = float, *, tail_max: int = TAIL_MAX) -> None:
        self.now = now
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.tail: deque[str] = deque(maxlen=tail_max)
        self.disturbances: list[Disturbance] = []
        self._hash = hashlib.sha256()

    def note(self, kind: str, *details: object) -> None:
        """Record an event. Its details must be deterministic."""
        line = f"{self.now():.6f} {kind} {' '.join(map(str, details))}"
        self.counts[kind] += 1
        self.tail.append(line)
        self._hash.update(line.encode() + b"\n")

    def disturb(self, node: str, what: str) -> None:
        """Connections of a node may break from now on."""
        self.disturbances.append(Disturbance(self.now(), node, what))
        self.note("fault", node, what)

    def disturbed(self, since: float, until: float, nodes: Collection[str]) -> bool:
        """Whether a fault hit one of the nodes within this time; without nodes, any node."""
        return any(since <= each.at <= until and (not nodes or each.node in nodes) for each in self.disturbances)

    def violated(self, rule: str, details: str = "") -> None:
        """Record a violated invariant."""
        self.note("VIOLATION", rule, details)
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{self.now():.3f} s: {rule}{': ' if details else ''}{details}")

    def expect(self, holds: object, rule: str, details: str = "") -> None:
        """Record a violation unless the invariant holds."""
        if not holds:
            self.violated(rule, details)

    @property
    def digest(self) -> str:
        """Hash of all events."""
        return self._hash.hexdigest()
