"""The circuit breaker of one replica: after failures it gets no requests for a while, then probes, then a slow start.

There are three outcomes, because a client's mistake says nothing about the replica: counted as a failure it would
eject healthy replicas, counted as a success it would readmit a broken one.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from forebay.core.errors import TABLE, Blame, Code
from forebay.core.resilience.brownout import BrownOut

SLOW_START_EXTRA: Final = 4.0
SLOW_START_S: Final = 30.0
"""A replica that has just come back counts as five times as loaded; this decays linearly over this time.

Not exponentially: the lowest cost wins however small the difference, so a long tail would keep requests away for as
long as the others are idle.
"""
BROWN_OUT_HANDICAP: Final = 4.0
"""Extra load factor of a slow replica: it still gets what the others cannot take."""


class Outcome(StrEnum):
    """How an attempt ended, as far as it says something about the replica."""

    OK = "ok"
    NEUTRAL = "neutral"
    """A client error, a client disconnect, a cancellation, or the replica was full or draining."""
    FAILED = "failed"


class State(StrEnum):
    """CLOSED lets requests through, OPEN none, HALF_OPEN a few."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED, _OPEN, _HALF_OPEN = State


class Event(StrEnum):
    """Transitions of a breaker."""

    TRIPPED = "tripped"
    """Too many failures."""
    WAITED = "waited"
    """Its open time has passed and a request is waiting."""
    RECOVERED = "recovered"
    """Enough probes succeeded."""
    RELAPSED = "relapsed"
    """A probe failed."""


NEXT: Final = {
    (_CLOSED, Event.TRIPPED): _OPEN,
    (_OPEN, Event.WAITED): _HALF_OPEN,
    (_HALF_OPEN, Event.RECOVERED): _CLOSED,
    (_HALF_OPEN, Event.RELAPSED): _OPEN,
}


class Why(StrEnum):
    """Why a replica is not considered healthy."""

    SOUND = ""
    IN_A_ROW = "too many failures in a row"
    SHARE = "too many failures among the latest attempts"
    PROBE = "a probe failed"
    SLOW = "its answers begin much later than those of its peers, or go on at a much lower pace"
    STALLS = "its streams stall"


class BreakerLimits(NamedTuple):
    """Thresholds of a breaker. More than `failed_share_max` x `window` failures in the last `window` attempts open
    it."""

    failures_max: int = 5
    """Consecutive failures that open it."""
    window: int = 32
    failed_share_max: float = 0.5
    open_s: float = 5.0
    open_s_max: float = 60.0
    """Each opening lasts twice as long as the previous one, up to this limit, which is also how long it must stay
    closed to reset."""
    probes_max: int = 2
    """Concurrent requests while it is half open."""
    successes_min: int = 3
    """Consecutive successful probes that close it."""


DEFAULTS: Final = BreakerLimits()


class Breaker:
    """The breaker of one generation of a replica. Every attempt calls `begin`, and `end` once with the returned
    mark."""

    __slots__ = (
        "_epoch",
        "_failed",
        "_in_a_row",
        "_limits",
        "_open_s",
        "_sound_since",
        "_successes",
        "_until",
        "_why",
        "brown_out",
        "probes",
        "state",
    )

    def __init__(self, limits: BreakerLimits = DEFAULTS) -> None:
        self.state = _CLOSED
        self.brown_out = BrownOut()
        self.probes = 0
        self._limits = limits
        self._epoch = 0
        self._failed = self._in_a_row = self._successes = 0
        self._open_s = limits.open_s
        self._until = 0.0
        self._sound_since = -math.inf
        self._why = Why.SOUND

    @property
    def why(self) -> Why:
        """Why the replica is not considered healthy; for display."""
        if self.state is _CLOSED and self.brown_out.active:
            return Why.STALLS if self.brown_out.stalling else Why.SLOW
        return self._why

    def admits(self, now: float) -> bool:
        """Whether a request may go to the replica."""
        if self.state is _CLOSED:
            return True
        return now >= self._until if self.state is _OPEN else self.probes < self._limits.probes_max

    def ready(self, now: float) -> None:
        """The replica has just become ready: begin its slow start."""
        self._sound_since = now

    def begin(self, now: float) -> int:
        """An attempt begins. Returns its mark."""
        if self.state is _OPEN and now >= self._until:
            self._move(Event.WAITED, now)
        if self.state is _HALF_OPEN:
            self.probes += 1
        return self._epoch

    def end(self, mark: int, outcome: Outcome, now: float) -> None:
        """The attempt has ended. It is ignored if the breaker has changed state since it began.

        May be called with OK as soon as the response begins, so that a long response does not occupy a probe slot.
        """
        if mark != self._epoch:
            return
        if self.state is _CLOSED:
            self._count(outcome, now)
        elif self.state is _HALF_OPEN:
            self.probes -= 1
            self._probed(outcome, now)

    def slow_start(self, now: float) -> float:
        """From 5 down to 1 for a replica that has been ready, and its breaker closed, for SLOW_START_S or longer."""
        if self.state is not _CLOSED:
            return 1.0 + SLOW_START_EXTRA
        return 1.0 + SLOW_START_EXTRA * max(0.0, 1.0 - (now - self._sound_since) / SLOW_START_S)

    def handicap(self, now: float) -> float:
        """The factor by which the replica's load is multiplied in replica selection; 1 for a healthy one."""
        return self.slow_start(now) * (BROWN_OUT_HANDICAP if self.brown_out.active else 1.0)

    def _count(self, outcome: Outcome, now: float) -> None:
        if outcome is Outcome.NEUTRAL:
            return
        limits = self._limits
        failed = outcome is Outcome.FAILED
        self._failed = (self._failed << 1 | failed) & ((1 << limits.window) - 1)
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if self._in_a_row >= limits.failures_max:
            self._trip(Why.IN_A_ROW, now)
        elif self._failed.bit_count() > limits.failed_share_max * limits.window:
            self._trip(Why.SHARE, now)

    def _trip(self, why: Why, now: float) -> None:
        if now - self._sound_since >= self._limits.open_s_max:
            self._open_s = self._limits.open_s
        self._why = why
        self._move(Event.TRIPPED, now)

    def _probed(self, outcome: Outcome, now: float) -> None:
        if outcome is Outcome.FAILED:
            self._why = Why.PROBE
            self._move(Event.RELAPSED, now)
        elif outcome is Outcome.OK:
            self._successes += 1
            if self._successes >= self._limits.successes_min:
                self._why = Why.SOUND
                self._move(Event.RECOVERED, now)

    def _move(self, event: Event, now: float) -> None:
        self.state = NEXT[self.state, event]
        self._epoch += 1
        self.probes = self._failed = self._in_a_row = self._successes = 0
        if self.state is _OPEN:
            self._until = now + self._open_s
            self._open_s = min(2 * self._open_s, self._limits.open_s_max)
        elif self.state is _CLOSED:
            self._sound_since = now


def admissible(breakers: Sequence[Breaker], now: float) -> list[int]:
    """The replicas that may get a request; never empty if there are any.

    If more than half are open, breakers are ignored: the rest would be overloaded, and the fault is probably
    elsewhere. Envoy does the same below its panic threshold, 50 % of the hosts.
    """
    admitted = [at for at, breaker in enumerate(breakers) if breaker.admits(now)]
    if len(admitted) == len(breakers):
        return admitted
    shut = sum(breaker.state is _OPEN and not breaker.admits(now) for breaker in breakers)
    return admitted if admitted and 2 * shut <= len(breakers) else list(range(len(breakers)))


def outcome_of(code: Code) -> Outcome:
    """What an error response says about its replica. A full or draining replica is not unhealthy."""
    return Outcome.FAILED if TABLE[code].blame is Blame.MODEL or code is Code.INTERNAL else Outcome.NEUTRAL
