"""What runs units is to Forebay: five methods. Control decides when and what, a provider only does and tells."""

from typing import Protocol

from forebay.core.reconcile import SeenUnit, Slot


class Provider(Protocol):
    """A place where units run. One control uses it at a time; another may take over at any moment."""

    async def place(self, slot: Slot, generation: int) -> None:
        """Start a unit. Returns when it is seen by `observe`, not when it is ready. Raises `ProviderError`.

        If this process dies in the middle, a later `observe` tells the unit, or tells it as ended; none is lost.
        """

    async def observe(self) -> tuple[SeenUnit, ...]:
        """All units, whoever started them, and those that ended and were not removed. Raises `ProviderError`.

        Who is told as ended has surely ended: its successor is started. Where a provider cannot see that, as of a
        machine that does not answer, nor kill it, a replica counts as alive until nobody has asked for its load for
        longer than its lease, when it has stopped itself.
        """

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        """With grace above 0 ask the unit to finish; with 0 kill it, or if it has ended, forget it. Idempotent.

        Returns at once; the caller comes back with 0 when the grace is over. Raises `ProviderError`.
        """

    async def changed(self) -> None:
        """Return when a unit may have ended. A hint: it may come late, early or for nothing."""

    def close(self) -> None:
        """Let go of everything; the units run on."""


class ProviderError(Exception):
    """A provider could not do it, or cannot tell; the text is for the operator. Nothing is known to have changed."""
