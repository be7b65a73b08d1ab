"""Circuit breakers, brown-out detection and the retry budget."""

from forebay.core.resilience.breaker import (
    DEFAULTS,
    NEXT,
    Breaker,
    BreakerLimits,
    Event,
    Outcome,
    State,
    Why,
    admissible,
    outcome_of,
)
from forebay.core.resilience.brownout import BrownOut, pool_pace_s, pool_ttft_s, pool_whole_s
from forebay.core.resilience.retries import RetryBudget

__all__ = [
    "DEFAULTS",
    "NEXT",
    "Breaker",
    "BreakerLimits",
    "BrownOut",
    "Event",
    "Outcome",
    "RetryBudget",
    "State",
    "Why",
    "admissible",
    "outcome_of",
    "pool_pace_s",
    "pool_ttft_s",
    "pool_whole_s",
]
