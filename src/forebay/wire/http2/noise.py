"""A limit on frames that cost us work and carry nothing: the abuse of RFC 9113, section 10.5.

Settings, pings, resets, empty data and window updates count as noise. Completed responses and time reduce it.
"""

from typing import Final

from forebay.wire.http2.frames import CALM_DOWN, ProtocolViolation

NOISE_MAX: Final = 20_000
NOISE_PER_TICK: Final = 5_000
"""How much noise each tick forgives."""
RESET_NOISE: Final = 10
"""The noise of a cancelled request, which has already cost parsing it."""
REQUEST_CREDIT: Final = 4
"""How much noise a completed request offsets."""
DATA_CREDIT: Final = 2
"""How much noise a sent DATA frame offsets, for the window updates that it will cause."""
EXCUSING_BYTES: Final = 1024
"""Only DATA frames of at least this size offset noise."""


class Noise:
    """The noise on one connection."""

    __slots__ = ("_level",)

    def __init__(self) -> None:
        self._level = 0

    def add(self, count: int) -> None:
        """Count noise. Call `check` once the received frames are processed."""
        self._level += count

    def forgive(self, count: int) -> None:
        """Offset some noise."""
        self._level = max(0, self._level - count)

    def check(self) -> None:
        """Raise `ProtocolViolation` if there is too much noise."""
        if self._level > NOISE_MAX:
            raise ProtocolViolation(CALM_DOWN, "too many frames that carry nothing")
