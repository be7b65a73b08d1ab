"""How long a lease may be used, by the holder's clock.

Two clocks measure the same lease: the granter's, which says when another holder may get it, and the holder's. The
holder starts counting before it asks, and stops early by the share that its clock may be too slow. Computers' clocks
differ by some parts per million; a fifth allows for virtual machines that lose time.
"""

from typing import Final, NamedTuple

DRIFT_MAX: Final = 0.2
"""How much slower than the granter's clock the holder's may run."""
ROUNDING_S: Final = 1e-6
"""Sums of times may be rounded up: by a clock as slow as allowed, a lease would seem to last a moment longer."""
RENEWALS: Final = 4
"""Renewals per lease duration, so that two in a row may fail."""
LOOKS: Final = 8
"""Checks per lease duration by waiting controllers for its expiry."""


def usable_until(asked_at: float, lease_s: float) -> float:
    """When to stop using a lease requested at `asked_at`, by the holder's clock, seconds."""
    return asked_at + lease_s * (1.0 - DRIFT_MAX) - ROUNDING_S


class ReplicaLease(NamedTuple):
    """A replica's lease, renewed by every load poll of control or a gateway; without one it stops itself."""

    asked_at: float
    """Time of the last load poll, or since when it can be polled; its own clock, seconds."""
    lease_s: float

    def ended(self, now: float) -> bool:
        """Whether the lease has expired."""
        return now - self.asked_at >= self.lease_s

    def look_again_s(self, now: float) -> float:
        """Seconds until it expires without another poll."""
        return max(0.0, self.asked_at + self.lease_s - now)


def expired_text(lease_s: float) -> str:
    """The message of a replica whose lease has expired."""
    return (
        f"neither control nor a gateway has polled its load for {lease_s:g} s (control.replica_lease_s): "
        "it is partitioned or orphaned, and stops itself"
    )
