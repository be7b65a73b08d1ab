"""What may fail of a promise, what has failed, and what is left of it: in time and in requests."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.availability.history import Stretch


@dataclass(frozen=True, slots=True)
class Requests:
    """What became of requests between two times, seconds since the epoch. Only `ok` and `failed` count."""

    since: float
    until: float
    ok: int = 0
    failed: int = 0
    """Through no fault of the client, those included for which there was no room or no time."""
    refused: int = 0
    """By the client's own fault."""
    cancelled: int = 0
    """The client went away."""

    @property
    def counted(self) -> int:
        """Those that succeeded or should have."""
        return self.ok + self.failed

    @property
    def share(self) -> float | None:
        """Of those that counted, so many succeeded; None: there were none."""
        return self.ok / self.counted if self.counted else None


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise about times: of the requests that ended well since then, so many kept it."""

    promise: str
    """`ttft`, `tpot` or `latency`."""
    promised_s: float
    since: float
    requests: int
    kept: int
    p99_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """An error budget. What is left is below 0 if more has failed than may."""

    allowed_s: float
    spent_s: float
    left_s: float
    unknown_s: float
    """Time nobody knows of: it is not counted as spent, and may have been."""
    allowed_requests: float
    spent_requests: int
    left_requests: float
    burn: float | None
    """How fast requests use it up: at 1 it is just gone at the end of the period. None: there were none."""


def budget(target: float, period_s: float, seen: Stretch, requests: Requests) -> Budget:
    """The budget of a period with a promised share, such as 0.999: 43.2 minutes of 30 days."""
    allowed = 1.0 - target
    return Budget(
        allowed_s=allowed * period_s,
        spent_s=seen.down_s,
        left_s=allowed * period_s - seen.down_s,
        unknown_s=max(0.0, period_s - seen.known_s),
        allowed_requests=allowed * requests.counted,
        spent_requests=requests.failed,
        left_requests=allowed * requests.counted - requests.failed,
        burn=None if requests.share is None else (1.0 - requests.share) / allowed,
    )


def kept(promise: str, promised_s: float, since: float, times_s: Sequence[float]) -> Kept | None:
    """How a promise was kept by the times of requests, seconds; None: there were none."""
    if not times_s:
        return None
    ordered = sorted(times_s)
    last = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return Kept(promise, promised_s, since, len(ordered), bisect_right(ordered, promised_s), ordered[last])
