"""The state of a model's autoscaler between decisions. Stored as JSON, so that a new controller continues from it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.core.scaling.learned import Learned
from forebay.core.scaling.rules.table import Rules


class WishRange(NamedTuple):
    """The range of recommendations in a short period, before the windows of `up` and `down`."""

    at: float
    """When it began."""
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """The state of one model. Times are seconds since the epoch."""

    known_at: float | None = None
    """When its load was last known."""
    since: float = 0.0
    """Since when it has been known without a gap."""
    asked_at: float | None = None
    """When there was last a request, or the first reading."""
    above: tuple[float | None, ...] = ()
    """Since when each of the limits is exceeded."""
    wishes: tuple[WishRange, ...] = ()
    """Within the windows of `up` and `down`, oldest first."""
    changes: tuple[tuple[float, int], ...] = ()
    """The last changes: when, and by how many replicas; oldest first."""
    rules: Rules = field(default_factory=Rules)
    """State of the other systems' policies."""
    learned: Learned = field(default_factory=Learned)
    """State of the policy `forebay`."""
