"""How long what was lent may be used, by the clock of whoever has borrowed it.

Two clocks that run differently measure the same lease: the lender's, which says when somebody else may have it, and
the borrower's. The borrower begins to count before it asks, and stops by the share that its clock may be too slow.
Clocks of computers differ by some millionths; a fifth is for virtual machines that are robbed of their time.
"""

from typing import Final, NamedTuple

DRIFT_MAX: Final = 0.2
"""So much slower than the lender's the borrower's clock may run."""
RENEWALS: Final = 4
"""So often a lease is renewed in its time, so that two in a row may fail."""
LOOKS: Final = 8
"""So often in its time those that wait look whether it has ended."""


def usable_until(asked_at: float, lease_s: float) -> float:
    """When to stop using a lease that was asked for at `asked_at`, by the borrower's clock, in seconds."""
    return asked_at + lease_s * (1.0 - DRIFT_MAX)


class Tending(NamedTuple):
    """A replica's lease: each question of control or of a gateway renews it."""

    asked_at: float
    """When somebody last asked for its load, or since when it can be asked; its own clock, seconds."""
    lease_s: float

    def ended(self, now: float) -> bool:
        """Whether nobody can count on it any more."""
        return now - self.asked_at >= self.lease_s

    def look_again_s(self, now: float) -> float:
        """In how many seconds it ends, if nobody asks until then."""
        return max(0.0, self.asked_at + self.lease_s - now)


def forgotten(lease_s: float) -> str:
    """The last words of a replica whose lease has ended."""
    return (
        f"neither control nor a gateway has asked for its load for {lease_s:g} s (control.replica_lease_s): "
        "it is cut off, or belongs to nobody, and stops itself"
    )
