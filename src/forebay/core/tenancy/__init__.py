"""Tenants: their API keys, their limits, and how several gateways share a limit."""

from forebay.core.tenancy.keys import (
    ANONYMOUS,
    ENTROPY_BYTES,
    Denied,
    Directory,
    Granted,
    KeyRecord,
    Quota,
    Tenant,
    authorise,
    contains_key,
    mint,
    without_keys,
)
from forebay.core.tenancy.leases import allot
from forebay.core.tenancy.quota import Limiter, Reservation
from forebay.core.tenancy.shares import LEASE_S, Amounts, Asked, Counts, Demand, Lease, amounts

__all__ = [
    "ANONYMOUS",
    "ENTROPY_BYTES",
    "LEASE_S",
    "Amounts",
    "Asked",
    "Counts",
    "Demand",
    "Denied",
    "Directory",
    "Granted",
    "KeyRecord",
    "Lease",
    "Limiter",
    "Quota",
    "Reservation",
    "Tenant",
    "allot",
    "amounts",
    "authorise",
    "contains_key",
    "mint",
    "without_keys",
]
