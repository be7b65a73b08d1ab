"""Limits as numbers, and what gateways and control say to each other of them. Values only: they cross processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from forebay.core.tenancy.keys import Quota

LEASE_S: Final = 10.0
"""How long a share of a minute is good after the report that it answers; control looks about once a second."""
ROUND_S: Final = 2
"""About how long it takes until a share has followed what was asked for, in whole seconds."""
UNLIMITED: Final = 1 << 60
"""Stands for a limit that there is not, larger than anything that is ever used."""


class Amounts(NamedTuple):
    """One number for each limit: requests and tokens of a minute, open streams, tokens of the day."""

    requests: int
    tokens: int
    streams: int
    day_tokens: int


def amounts(quota: Quota) -> Amounts:
    """A tenant's limits as numbers."""
    limits = (quota.requests_per_min, quota.tokens_per_min, quota.streams_max, quota.tokens_per_day)
    return Amounts(*(UNLIMITED if limit is None else limit for limit in limits))


def equal_part(limit: Amounts, gateways: int) -> Amounts:
    """What each gateway may hand out while nothing else was agreed."""
    return Amounts(*(total if total >= UNLIMITED else total // gateways for total in limit))


class Asked(NamedTuple):
    """A tenant at one gateway: the share it goes by, what is used of it, and what was asked for, granted or not."""

    share: Amounts
    used: Amounts
    wanted: Amounts


@dataclass(frozen=True, slots=True)
class Demand:
    """What a gateway reports of all tenants with limits. `at`: its own clock; `day`: since the epoch, in UTC."""

    at: float
    day: int
    tenants: Mapping[str, Asked]
    refused: Mapping[str, Amounts] = field(default_factory=dict)
    """What the largest request of a tenant needs that was refused lately, and none as large let in since."""
    lacking_s: Mapping[str, int] = field(default_factory=dict)
    """For how long such a one has been refused, seconds."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one gateway may hand out.

    `asked_at` is `Demand.at` of the report that it answers (the gateway's clock), `heard_at` when control had that
    report (control's clock). `held`: what the gateway may still go by or have used, until it reports otherwise.
    """

    asked_at: float
    heard_at: float
    day: int
    shares: Mapping[str, Amounts]
    held: Mapping[str, Amounts]
    left: Mapping[str, Amounts] = field(default_factory=dict)
    """What no gateway has used, as far as control knows: of a silent one all that it holds counts as used."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a gateway has counted, for its next start. `at` is seconds since the epoch, `pid` its process."""

    at: float
    day: int
    used: dict[str, Amounts]
    pid: int = 0
