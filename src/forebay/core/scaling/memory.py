"""What the scaler of a model remembers from look to look. It is kept as JSON: a new controller goes on from it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.core.scaling.learned import Learned
from forebay.core.scaling.rules.table import Rules


class Wished(NamedTuple):
    """What was wished for in a short time, before the windows of `up` and `down`."""

    at: float
    """When it began."""
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one model. Times are seconds since the epoch."""

    known_at: float | None = None
    """When its load was last known."""
    since: float = 0.0
    """Since when it has been known without a gap."""
    asked_at: float | None = None
    """When there was last a request, or the first look."""
    above: tuple[float | None, ...] = ()
    """Since when each of the limits is exceeded."""
    wishes: tuple[Wished, ...] = ()
    """Within the windows of `up` and `down`, the oldest first."""
    changes: tuple[tuple[float, int], ...] = ()
    """The last changes: when, and by how many replicas; the oldest first."""
    rules: Rules = field(default_factory=Rules)
    """Of the policies that are not ours."""
    learned: Learned = field(default_factory=Learned)
    """Of ours."""
