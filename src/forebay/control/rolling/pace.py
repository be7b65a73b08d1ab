"""The request rate of a model over the last minutes, from the gateways' counters."""

import re
from collections import deque
from collections.abc import Mapping
from typing import Final

ASK_EVERY_S: Final = 15.0
WINDOW_S: Final = 300.0
SPAN_S_MIN: Final = 10.0
"""The least time span for an estimate."""
LINE: Final = re.compile(rb'^forebay_requests_total\{(?:[^}]*,)?model="([^"]*)"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)


def requests_in(page: bytes) -> dict[str, float]:
    """The requests answered by a gateway since its start, by model, from its metrics page."""
    found: dict[str, float] = {}
    for name, count in LINE.findall(page):
        model = name.decode()
        found[model] = found.get(model, 0.0) + float(count)
    return found


class Pace:
    """Sums over gateways; a restarted gateway counts from zero."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._told: deque[tuple[float, dict[str, float]]] = deque()
        self._sums: dict[str, float] = {}
        self._asked_at = -ASK_EVERY_S

    def is_due(self, now: float) -> bool:
        """Whether to poll the gateways now. Times are those of one clock, in seconds."""
        return now >= self._asked_at + ASK_EVERY_S

    def take(self, pages: Mapping[str, bytes], now: float) -> None:
        """Process the pages of all gateways that responded, by slot."""
        self._asked_at = now
        if not pages:
            return
        for slot, page in pages.items():
            counts, before = requests_in(page), self._last.get(slot)
            for model, count in counts.items():
                had = count if before is None else before.get(model, 0.0)
                self._sums[model] = self._sums.get(model, 0.0) + (count - had if count >= had else count)
            self._last[slot] = counts
        self._told.append((now, dict(self._sums)))
        while self._told[0][0] < now - WINDOW_S:
            self._told.popleft()

    def per_s(self, model: str) -> float | None:
        """Requests per second; None: not known yet."""
        if len(self._told) < 2 or self._told[-1][0] - self._told[0][0] < SPAN_S_MIN:
            return None
        (began, first), (ended, last) = self._told[0], self._told[-1]
        return (last.get(model, 0.0) - first.get(model, 0.0)) / (ended - began)
