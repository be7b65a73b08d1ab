"""The provider protocol: five methods. Control decides what runs; a provider executes and reports."""

from typing import Protocol

from forebay.core.reconcile import ObservedUnit, Slot


class Provider(Protocol):
    """Where units run. One control uses it at a time; another may take over at any moment."""

    async def place(self, slot: Slot, generation: int) -> None:
        """Start a unit. Returns once `observe` sees it, not when it is ready. Raises `ProviderError`.

        If this process dies meanwhile, a later `observe` reports the unit as running or as ended; none is lost.
        """

    async def observe(self) -> tuple[ObservedUnit, ...]:
        """All units, whoever started them, including those that ended and were not removed. Raises `ProviderError`.

        A unit reported as ended must really have ended, since its successor is started. If a provider can neither see
        nor kill a unit, as on an unreachable machine, a replica counts as alive until nobody has polled its load for
        longer than its lease: by then it has stopped itself.
        """

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        """With a grace period ask the unit to finish; with 0 kill it, or forget it if it has ended. Idempotent.

        Returns at once; the caller calls again with 0 when the grace period is over. Raises `ProviderError`.
        """

    async def changed(self) -> None:
        """Return when a unit may have ended. Only a hint: it may be late, early or wrong."""

    def close(self) -> None:
        """Release all resources; the units keep running."""


class ProviderError(Exception):
    """An operation failed, or its outcome is unknown; the text is for the operator."""
