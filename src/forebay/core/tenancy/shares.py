"""Limits as numbers, and the messages about them between gateways and control. Values only: they cross processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from forebay.core.tenancy.keys import Quota

LEASE_S: Final = 10.0
"""How long a per-minute share is valid after the report it answers; control updates about once a second."""
ROUND_S: Final = 2
"""About how long it takes for a share to follow demand, in whole seconds."""
UNLIMITED: Final = 1 << 60
"""Stands for "no limit"; larger than any usage."""


class Amounts(NamedTuple):
    """One number per limit: requests and tokens per minute, open streams, tokens of the day."""

    requests: int
    tokens: int
    streams: int
    day_tokens: int


def amounts(quota: Quota) -> Amounts:
    """A tenant's limits as numbers."""
    limits = (quota.requests_per_min, quota.tokens_per_min, quota.streams_max, quota.tokens_per_day)
    return Amounts(*(UNLIMITED if limit is None else limit for limit in limits))


def equal_part(limit: Amounts, gateways: int) -> Amounts:
    """What each gateway may hand out until something else is agreed."""
    return Amounts(*(total if total >= UNLIMITED else total // gateways for total in limit))


def within(share: Amounts, limit: Amounts) -> Amounts:
    """A share of an older limit as one of this limit: at most the whole of it, and unlimited where it is."""
    pairs = zip(share, limit, strict=True)
    return Amounts(*(UNLIMITED if total >= UNLIMITED else min(part, total) for part, total in pairs))


class Asked(NamedTuple):
    """A tenant at one gateway: the share in use, its usage, and its demand, granted or not."""

    share: Amounts
    used: Amounts
    wanted: Amounts


@dataclass(frozen=True, slots=True)
class Demand:
    """A gateway's report on all tenants with limits. `at`: its own clock; `day`: since the epoch, in UTC."""

    at: float
    day: int
    tenants: Mapping[str, Asked]
    refused: Mapping[str, Amounts] = field(default_factory=dict)
    """Needs of a tenant's largest recently rejected request, unless one as large was admitted since."""
    lacking_s: Mapping[str, int] = field(default_factory=dict)
    """For how long such requests have been rejected, seconds."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one gateway may hand out.

    `asked_at` is `Demand.at` of the report it answers (the gateway's clock), `heard_at` when control got that report
    (control's clock). `held`: the most the gateway may still use or have used, until it reports otherwise.
    """

    asked_at: float
    heard_at: float
    day: int
    shares: Mapping[str, Amounts]
    held: Mapping[str, Amounts]
    left: Mapping[str, Amounts] = field(default_factory=dict)
    """What no gateway has used, as far as control knows; all that a silent gateway holds counts as used."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A gateway's saved counts, for its next start. `at` is seconds since the epoch. `pid`, `ticks` and `boot` say
    which process it was, even if its pid is given to another one."""

    at: float
    day: int
    used: dict[str, Amounts]
    pid: int = 0
    ticks: int = 0
    """When that process started, clock ticks since boot."""
    boot: str = ""
