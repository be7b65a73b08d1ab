"""The rate limits of a HorizontalPodAutoscaler: `behavior` of autoscaling/v2.

Source: kubernetes/kubernetes, pkg/controller/podautoscaler/horizontal.go (stabilizeRecommendationWithBehaviors,
calculateScaleUpLimitWithScalingRules, calculateScaleDownLimitWithBehaviors), and the defaults of
pkg/apis/autoscaling/v2/defaults.go.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple


class Limit(NamedTuple):
    """At most this many replicas, or this share of the current ones, per period."""

    replicas: int
    share: float
    period_s: float


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Of several limits the most permissive applies, as with `selectPolicy: Max`."""

    up_window_s: float
    """Scale up to the lowest recommendation in it."""
    down_window_s: float
    """Scale down to the highest recommendation in it."""
    up: tuple[Limit, ...]
    down: tuple[Limit, ...]


DEFAULT: Final = Behaviour(0.0, 300.0, (Limit(0, 1.0, 15.0), Limit(4, 0.0, 15.0)), (Limit(0, 1.0, 15.0),))


@dataclass(frozen=True, slots=True)
class Past:
    """Recent recommendations and changes, as (time, number)."""

    wanted: tuple[tuple[float, int], ...] = ()
    changes: tuple[tuple[float, int], ...] = ()
    current: int = -1
    """As last seen; -1: never."""


def held(behaviour: Behaviour, past: Past, wanted: int, current: int, now: float) -> tuple[int, Past]:
    """The recommendation after windows and limits. Changes are detected by observing `current`, whatever their
    cause."""
    window_s = max(behaviour.up_window_s, behaviour.down_window_s)
    period_s = max(limit.period_s for limit in (*behaviour.up, *behaviour.down))
    wishes = (*[each for each in past.wanted if each[0] > now - window_s], (now, wanted))
    changes = tuple([each for each in past.changes if each[0] > now - period_s])
    if past.current not in {-1, current}:
        changes = (*changes, (now, current - past.current))
    least = min([many for at, many in wishes if at > now - behaviour.up_window_s], default=wanted)
    most = max([many for at, many in wishes if at > now - behaviour.down_window_s], default=wanted)
    allowed = min(max(current, min(least, wanted)), max(most, wanted))
    if allowed > current:
        allowed = min(allowed, max(_highest(limit, changes, current, now) for limit in behaviour.up))
    elif allowed < current:
        allowed = max(allowed, min(_lowest(limit, changes, current, now) for limit in behaviour.down))
    return allowed, Past(wishes, changes, current)


def _highest(limit: Limit, changes: tuple[tuple[float, int], ...], current: int, now: float) -> int:
    begun = current - sum([many for at, many in changes if many > 0 and at > now - limit.period_s])
    return max(current, begun + limit.replicas if limit.replicas else math.ceil(begun * (1 + limit.share)))


def _lowest(limit: Limit, changes: tuple[tuple[float, int], ...], current: int, now: float) -> int:
    begun = current - sum([many for at, many in changes if many < 0 and at > now - limit.period_s])
    return min(current, begun - limit.replicas if limit.replicas else int(begun * (1 - limit.share)))
