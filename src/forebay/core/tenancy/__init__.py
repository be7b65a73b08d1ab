"""Tenants: their API keys, what they may use, and how several gateways share a limit."""

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
    mint,
)
from forebay.core.tenancy.leases import allot
from forebay.core.tenancy.quota import (
    LEASE_S,
    Amounts,
    Asked,
    Demand,
    Lease,
    Limiter,
    Reservation,
    amounts,
)

__all__ = [
    "ANONYMOUS",
    "ENTROPY_BYTES",
    "LEASE_S",
    "Amounts",
    "Asked",
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
    "mint",
]
