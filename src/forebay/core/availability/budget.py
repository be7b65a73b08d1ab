"""Error budgets of service level objectives: allowed, spent and left, in time and in requests."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.availability.history import AvailabilitySums


@dataclass(frozen=True, slots=True)
class Requests:
    """Outcomes of requests between two times, seconds since the epoch. Only `ok` and `failed` count."""

    since: float
    until: float
    ok: int = 0
    failed: int = 0
    """Not caused by the client, including those rejected for lack of capacity or time."""
    refused: int = 0
    """Rejected because of a client error."""
    cancelled: int = 0
    """The client disconnected."""

    @property
    def counted(self) -> int:
        """Requests that succeeded or should have."""
        return self.ok + self.failed

    @property
    def share(self) -> float | None:
        """The share of counted requests that succeeded; None: there were none."""
        return self.ok / self.counted if self.counted else None


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """A latency objective: how many of the successful requests since then met it."""

    promise: str
    """`ttft`, `tpot` or `latency`."""
    promised_s: float
    since: float
    requests: int
    kept: int
    p99_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """An error budget. What is left is negative if it is overspent."""

    allowed_s: float
    spent_s: float
    left_s: float
    unknown_s: float
    """Unobserved time: not counted as spent, but it may have been."""
    allowed_requests: float
    spent_requests: int
    left_requests: float
    burn: float | None
    """Burn rate by requests: at 1 the budget is used up exactly at the end of the period. None: no requests."""


def budget(target: float, period_s: float, seen: AvailabilitySums, requests: Requests) -> Budget:
    """The budget of a period with a target such as 0.999: 43.2 minutes of 30 days."""
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


def objective_result(
    promise: str, promised_s: float, since: float, times_s: Sequence[float]
) -> ObjectiveResult | None:
    """How an objective was met by requests' times, seconds; None: there were none."""
    if not times_s:
        return None
    ordered = sorted(times_s)
    last = min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)
    return ObjectiveResult(promise, promised_s, since, len(ordered), bisect_right(ordered, promised_s), ordered[last])
