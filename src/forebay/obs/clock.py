"""The only place that reads the wall clock and makes up identifiers."""

import secrets
import time

ID_BYTES = 12


def wall_s() -> float:
    """Seconds since the epoch. For stamps people read, never for durations (those are the loop's time)."""
    return time.time()  # noqa: TID251 - this is the wall clock


def new_id(prefix: str) -> str:
    """An identifier nobody can guess, such as `req-9f86d081884c7d659a2feaa0`."""
    return f"{prefix}-{secrets.token_hex(ID_BYTES)}"
