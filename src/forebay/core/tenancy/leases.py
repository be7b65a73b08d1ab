"""How several gateways share one limit without asking anybody per request.

Control hears what every gateway was asked for and answers with leases: the share of each limit that it may hand out.
The rule that keeps the sum under the limit: a share grows only out of what nobody holds, and a gateway holds the
largest of what it goes by, what it was last given, and what it has used, until a later report of its own says less.

- Shares add up to at most the limit, in any 60 s, whatever crashes, is cut off, or reads its lease late.
- A gateway that hears nothing keeps its share for `LEASE_S`, and then the smaller of that and limit / gateways;
  of streams and of the day's tokens it keeps what it has, as control never takes those back from the silent.
- A gateway in reach of control always has at least `FLOOR` of limit / gateways, so losing control never leaves it
  with nothing. A limit should therefore be at least the number of gateways.
- A gateway that never had a lease has limit / gateways.

So the bound is the limit itself. Beyond it go only: an answer that used more than its estimate (that counts when it
is known), and what a gateway that was killed had handed out since it last saved its counts, at most its share.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from forebay.core.tenancy.quota import SLOTS
from forebay.core.tenancy.shares import LEASE_S, UNLIMITED, Amounts, Demand, Lease, equal_part

FLOOR: Final = Amounts(25, 25, 25, 0)
"""Percent of an equal part that a gateway has whatever the others want."""
_DAY: Final = Amounts._fields.index("day_tokens")


class _Cell(NamedTuple):
    """One limit of one tenant at one gateway. `heard`: its report is about this very thing."""

    share: int
    held: int
    wanted: int
    heard: bool


def allot(
    limits: Mapping[str, Amounts],
    demands: Mapping[str, Demand],
    before: Mapping[str, Lease],
    *,
    gateways: Iterable[str],
    day: int,
    now: float,
) -> dict[str, Lease]:
    """The leases that follow on `before`, for `gateways`: all that are wanted or may still run.

    `demands` are reports asked for and received since the last call; a gateway without one is silent. `now` is
    control's clock, the same in every call; `day` counts from the epoch in UTC.
    """
    names = sorted(gateways)
    shares: dict[str, dict[str, Amounts]] = {name: {} for name in names}
    held: dict[str, dict[str, Amounts]] = {name: {} for name in names}
    for tenant, limit in sorted(limits.items()):
        part = equal_part(limit, len(names))
        rows = [_cells(tenant, part, demands.get(name), before.get(name), day=day, now=now) for name in names]
        columns = [
            _divide(total, math.ceil(equal * percent / 100), column)
            for total, equal, percent, column in zip(limit, part, FLOOR, zip(*rows, strict=True), strict=True)
        ]
        for name, row in zip(names, zip(*columns, strict=True), strict=True):
            shares[name][tenant] = Amounts(*(cell.share for cell in row))
            held[name][tenant] = Amounts(*(cell.held for cell in row))
    leases = {}
    for name in names:
        lease, demand = before.get(name), demands.get(name)
        heard_at = now if demand or not lease else min(lease.heard_at, now)
        asked_at = demand.at if demand else lease.asked_at if lease else -LEASE_S
        leases[name] = Lease(asked_at, heard_at, day, shares[name], held[name])
    return leases


def _cells(
    tenant: str, part: Amounts, demand: Demand | None, lease: Lease | None, *, day: int, now: float
) -> list[_Cell]:
    """What is known of a tenant at a gateway, limit by limit."""
    share = lease.shares.get(tenant, part) if lease else part
    held = lease.held.get(tenant, part) if lease else part
    if lease and lease.day != day:
        share = share._replace(day_tokens=part.day_tokens)
        held = held._replace(day_tokens=part.day_tokens)
    asked = demand.tenants.get(tenant) if demand else None
    if lease and not demand and now - lease.heard_at > LEASE_S + SLOTS:
        # its lease has run out, and so has the minute after it
        share = share._replace(requests=min(share.requests, part.requests), tokens=min(share.tokens, part.tokens))
        held = held._replace(requests=min(held.requests, part.requests), tokens=min(held.tokens, part.tokens))
    if not demand or not asked:
        return [_Cell(given, most, 0, False) for given, most in zip(share, held, strict=True)]
    cells = [
        _Cell(given, max(given, goes_by, used), wanted, True)
        for given, goes_by, used, wanted in zip(share, *asked, strict=True)
    ]
    if demand.day != day:
        cells[_DAY] = _Cell(share.day_tokens, held.day_tokens, 0, False)
    return cells


def _divide(limit: int, floor: int, cells: Sequence[_Cell]) -> list[_Cell]:
    """New shares: to each what it wants as far as that goes, the rest evenly; growth only out of what is free."""
    heard = [cell for cell in cells if cell.heard]
    if limit >= UNLIMITED or not heard:
        return list(cells)
    rest = max(0, limit - sum(cell.held for cell in cells if not cell.heard))
    floor = min(floor, rest // len(heard))
    rest -= floor * len(heard)
    wanted = _fill(rest, [max(0, cell.wanted - floor) for cell in heard])
    each, odd = divmod(rest - sum(wanted), len(heard))
    aims = [floor + more + each + (index < odd) for index, more in enumerate(wanted)]
    free = max(0, limit - sum(cell.held for cell in cells))
    growth = _fill(free, [max(0, aim - cell.held) for aim, cell in zip(aims, heard, strict=True)])
    given = iter(zip(aims, growth, strict=True))
    divided = []
    for cell in cells:
        if cell.heard:
            aim, more = next(given)
            share = min(aim, cell.held + more)
            divided.append(cell._replace(share=share, held=max(share, cell.held)))
        else:
            divided.append(cell)
    return divided


def _fill(pool: int, wants: Sequence[int]) -> list[int]:
    """Max-min fair: nobody gets more than it wants, and nobody who gets less than that gets less than another."""
    given = [0] * len(wants)
    order = sorted(range(len(wants)), key=lambda index: wants[index])
    for served, index in enumerate(order):
        given[index] = min(wants[index], pool // (len(order) - served))
        pool -= given[index]
    return given
