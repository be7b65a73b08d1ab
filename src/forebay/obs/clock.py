"""The only place that reads the wall clock and generates identifiers."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ID_BYTES = 12

_wall: Callable[[], float] = time.time  # noqa: TID251 - this is the wall clock
_hex: Callable[[int], str] = secrets.token_hex


def wall_s() -> float:
    """Seconds since the epoch. For timestamps, never for durations (those use the loop's time)."""
    return _wall()


def random_hex(size_bytes: int) -> str:
    """Cryptographically random bytes in hex, two digits per byte."""
    return _hex(size_bytes)


def new_id(prefix: str, separator: str = "-") -> str:
    """An unguessable identifier, such as `req-9f86d081884c7d659a2feaa0`."""
    return f"{prefix}{separator}{_hex(ID_BYTES)}"


@contextmanager
def standing_in(wall: Callable[[], float], random_hex: Callable[[int], str]) -> Iterator[None]:
    """Replace the clock and the random source of the whole process within the `with` block."""
    global _hex, _wall
    before = _wall, _hex
    _wall, _hex = wall, random_hex
    try:
        yield
    finally:
        _wall, _hex = before
