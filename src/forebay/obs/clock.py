"""The only place that reads the wall clock and makes up identifiers."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ID_BYTES = 12

_wall: Callable[[], float] = time.time  # noqa: TID251 - this is the wall clock
_hex: Callable[[int], str] = secrets.token_hex


def wall_s() -> float:
    """Seconds since the epoch. For stamps people read, never for durations (those are the loop's time)."""
    return _wall()


def random_hex(size_bytes: int) -> str:
    """Two digits for each of `size_bytes` random bytes, which nobody can guess."""
    return _hex(size_bytes)


def new_id(prefix: str) -> str:
    """An identifier nobody can guess, such as `req-9f86d081884c7d659a2feaa0`."""
    return f"{prefix}-{_hex(ID_BYTES)}"


@contextmanager
def standing_in(wall: Callable[[], float], random_hex: Callable[[int], str]) -> Iterator[None]:
    """Inside of the `with`, dates and identifiers of the whole process come from these."""
    global _hex, _wall
    before = _wall, _hex
    _wall, _hex = wall, random_hex
    try:
        yield
    finally:
        _wall, _hex = before
