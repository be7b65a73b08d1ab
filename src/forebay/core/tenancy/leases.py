"""How several gateways share one limit without a remote call per request.

Control receives every gateway's demand and responds with leases: the share of each limit that it may hand out. The
rule that keeps the sum under the limit: a share grows only out of what no gateway holds, and a gateway holds the
maximum of the share it uses, the one last given to it and its usage, until a later report of its own says less.

- Shares add up to at most the limit, in any 60 s, whatever crashes, is partitioned, or reads its lease late.
- A gateway without contact keeps its share for `LEASE_S`, then the smaller of that and limit / gateways; of streams
  and daily tokens it keeps what it has, as control never takes those back from a silent gateway.
- A gateway in contact with control has at least `FLOOR` of limit / gateways, so losing control does not leave it with
  nothing. A limit should therefore be at least the number of gateways.
- One request cannot be served from several gateways' shares. If an even division leaves no gateway able to serve a
  rejected request that fits what is left of every limit, one gateway gets all of that, also out of the others'
  floors: so the request is admitted if it is retried within `LACK_S`.
- A gateway that never had a lease has limit / gateways: one that is added while others hold all of a limit may hand
  that out in addition, until its first lease. With less it would reject requests of tenants far below their limits.

So the bound is the limit itself. It can be exceeded only by responses that used more than their estimate (counted
when known), and by what a process of a gateway had handed out since it last saved its counts, at most its share and
at most of a second or so: when it is killed, and when its successor already takes requests too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from forebay.core.tenancy.quota import SLOTS
from forebay.core.tenancy.shares import LEASE_S, UNLIMITED, Amounts, Asked, Demand, Lease, equal_part

FLOOR: Final = Amounts(25, 25, 25, 0)
"""Percent of an equal part that every gateway has, whatever the others demand."""
_DAY: Final = Amounts._fields.index("day_tokens")
_NOTHING: Final = Amounts(0, 0, 0, 0)


class _Cell(NamedTuple):
    """One limit of one tenant at one gateway. `heard`: it reported this limit; otherwise `used` is assumed to be
    `held`."""

    share: int
    held: int
    used: int
    wanted: int
    heard: bool


_Known: TypeAlias = tuple[Amounts, Amounts, Asked | None, bool]
"""Of a tenant at a gateway: the share last given, what is held, its report (None: it sent none), and whether that is
of today."""
_Case: TypeAlias = tuple[Amounts, tuple[_Known, ...], tuple[Amounts, ...], tuple[int, ...]]
"""All that a division depends on: the limits, and what is known, rejected and since when, gateway by gateway."""


class _Parts(NamedTuple):
    """A tenant's limits, divided: what each gateway gets and may hold, and what none of them has used."""

    shares: Sequence[Amounts]
    held: Sequence[Amounts]
    left: Amounts


def allot(
    limits: Mapping[str, Amounts],
    demands: Mapping[str, Demand],
    before: Mapping[str, Lease],
    *,
    gateways: Iterable[str],
    day: int,
    now: float,
) -> dict[str, Lease]:
    """The leases that follow `before`, for `gateways`: all that are desired or may still run.

    `demands` are the reports received since the last call; a gateway without one is silent. `now` is control's clock,
    the same in every call; `day` counts from the epoch in UTC.
    """
    names = sorted(gateways)
    reports = [demands.get(name) for name in names]
    shares: dict[str, dict[str, Amounts]] = {name: {} for name in names}
    held: dict[str, dict[str, Amounts]] = {name: {} for name in names}
    left: dict[str, Amounts] = {}
    alike: dict[_Case, _Parts] = {}  # most of thousands of tenants are idle, with the same few limits
    for tenant, limit in sorted(limits.items()):
        part = equal_part(limit, len(names))
        case: _Case = (
            limit,
            tuple([_known(tenant, part, reports[at], before.get(n), day=day, now=now) for at, n in enumerate(names)]),
            tuple([each.refused.get(tenant, _NOTHING) if each else _NOTHING for each in reports]),
            tuple([each.lacking_s.get(tenant, 0) if each else 0 for each in reports]),
        )
        parts = alike.get(case)
        if parts is None:
            parts = alike[case] = _parts(part, *case)
        for name, share, most in zip(names, parts.shares, parts.held, strict=True):
            shares[name][tenant] = share
            held[name][tenant] = most
        left[tenant] = parts.left
    leases = {}
    for name in names:
        lease, demand = before.get(name), demands.get(name)
        heard_at = now if demand or not lease else min(lease.heard_at, now)
        asked_at = demand.at if demand else lease.asked_at if lease else -LEASE_S
        leases[name] = Lease(asked_at, heard_at, day, shares[name], held[name], left=left)
    return leases


def _known(tenant: str, part: Amounts, demand: Demand | None, lease: Lease | None, *, day: int, now: float) -> _Known:
    """What is known of a tenant at a gateway."""
    share = lease.shares.get(tenant, part) if lease else part
    held = lease.held.get(tenant, part) if lease else part
    if lease and lease.day != day:
        share = share._replace(day_tokens=part.day_tokens)
        held = held._replace(day_tokens=part.day_tokens)
    if lease and not demand and now - lease.heard_at > LEASE_S + SLOTS:
        # its lease has expired, and so has the minute after it
        share = share._replace(requests=min(share.requests, part.requests), tokens=min(share.tokens, part.tokens))
        held = held._replace(requests=min(held.requests, part.requests), tokens=min(held.tokens, part.tokens))
    asked = demand.tenants.get(tenant) if demand else None
    if asked is not None:
        asked = asked._replace(share=_limited(asked.share, part))
    return _limited(share, part), _limited(held, part), asked, demand is not None and demand.day == day


def _limited(given: Amounts, part: Amounts) -> Amounts:
    """What was given without a limit that there is now: an equal part, with which a gateway begins when it hears of
    the limit. Otherwise one that is silent would hold more than all of it."""
    if UNLIMITED not in given:
        return given
    return Amounts(*[equal if each >= UNLIMITED else each for each, equal in zip(given, part, strict=True)])


def _parts(
    part: Amounts,
    limit: Amounts,
    known: Sequence[_Known],
    refused: Sequence[Amounts],
    lacking_s: Sequence[int],
) -> _Parts:
    """The division of one tenant's limits."""
    columns = _divide(limit, part, list(zip(*map(_cells, known), strict=True)), refused, lacking_s)
    rows = list(zip(*columns, strict=True))
    return _Parts(
        [Amounts(*[cell.share for cell in row]) for row in rows],
        [Amounts(*[cell.held for cell in row]) for row in rows],
        Amounts(*[max(0, _left(*each)) for each in zip(limit, columns, strict=True)]),
    )


def _cells(known: _Known) -> list[_Cell]:
    """The same, limit by limit."""
    share, held, asked, today = known
    if asked is None:
        return [_Cell(given, most, most, 0, False) for given, most in zip(share, held, strict=True)]
    cells = [
        _Cell(given, max(given, goes_by, used), used, wanted, True)
        for given, goes_by, used, wanted in zip(share, *asked, strict=True)
    ]
    if not today:
        cells[_DAY] = _Cell(share.day_tokens, held.day_tokens, held.day_tokens, 0, False)
    return cells


def _divide(
    limit: Amounts,
    part: Amounts,
    columns: Sequence[Sequence[_Cell]],
    refused: Sequence[Amounts],
    lacking_s: Sequence[int],
) -> list[list[_Cell]]:
    """New shares, limit by limit. `refused`: the needs of each gateway's largest rejected request, rejected since
    `lacking_s`."""
    floors = [math.ceil(equal * percent / 100) for equal, percent in zip(part, FLOOR, strict=True)]
    needs = [[0] * len(refused) for _ in limit]
    aims = [_aims(*each) for each in zip(limit, floors, columns, needs, strict=True)]
    host = _host(limit, columns, aims, refused, lacking_s) if any(map(any, refused)) else None
    if host is not None:
        needs = [[cell.used for cell in cells] for cells in columns]
        for of_kind, amount in zip(needs, refused[host], strict=True):
            of_kind[host] += amount
        aims = [_aims(*each) for each in zip(limit, floors, columns, needs, strict=True)]
    return [_grow(*each) for each in zip(limit, columns, aims, needs, strict=True)]


def _host(
    limit: Amounts,
    columns: Sequence[Sequence[_Cell]],
    aims: Sequence[Sequence[int]],
    refused: Sequence[Amounts],
    lacking_s: Sequence[int],
) -> int | None:
    """The gateway that should get all that its rejected request needs, if by `aims` no gateway could serve it.

    All limits are considered together, as a request needs room in each of them at one gateway. Of several gateways,
    the one that has lacked it longest wins, then the one that lacks least: so the choice is stable until the request
    was admitted or is no longer retried, and the one served last has the lowest priority.
    """
    kinds = [kind for kind, total in enumerate(limit) if total < UNLIMITED]
    left = [_left(limit[kind], columns[kind]) for kind in kinds]
    reach = [index for index in range(len(refused)) if all(columns[kind][index].heard for kind in kinds)]
    rooms = list(zip(*(_rooms(limit[kind], columns[kind], aims[kind]) for kind in kinds), strict=True))
    host, most = None, (0, 0.0)
    for index in reach:
        need = [refused[index][kind] for kind in kinds]
        if not any(need) or not _fits(need, left) or any(_fits(need, rooms[other]) for other in reach):
            continue
        cells = [columns[kind][index] for kind in kinds]
        has = min((cell.share - cell.used) / amount for cell, amount in zip(cells, need, strict=True) if amount)
        claim = (lacking_s[index], has)
        if host is None or claim > most:
            host, most = index, claim
    return host


def _rooms(limit: int, cells: Sequence[_Cell], aims: Sequence[int]) -> list[int]:
    """What each could admit beyond its usage, once shares are as near to `aims` as they get by `_grow`: nobody gives
    up what it holds below its aim, even if another one uses so much that the aims together exceed the limit."""
    kept = [max(cell.used, min(aim, cell.held)) for aim, cell in zip(aims, cells, strict=True)]
    wants = [max(0, aim - most) for aim, most in zip(aims, kept, strict=True)]
    more = _fill(max(0, limit - sum(kept)), wants)
    return [most + extra - cell.used for most, extra, cell in zip(kept, more, cells, strict=True)]


def _fits(need: Sequence[int], room: Sequence[int]) -> bool:
    return all(amount <= most for amount, most in zip(need, room, strict=True))


def _left(limit: int, cells: Sequence[_Cell]) -> int:
    """What no gateway has used; negative if the limit was lowered, or a response was longer than estimated."""
    return limit if limit >= UNLIMITED else limit - sum(cell.used for cell in cells)


def _aims(limit: int, floor: int, cells: Sequence[_Cell], needs: Sequence[int]) -> list[int]:
    """Target shares of the gateways heard: `needs` (which must fit), then the floor, then their demand, the rest
    evenly."""
    if limit >= UNLIMITED:
        return [UNLIMITED] * len(cells)
    rest = max(0, limit - sum([cell.held for cell in cells if not cell.heard]))
    aims = [need if cell.heard else 0 for need, cell in zip(needs, cells, strict=True)]
    for goals in ([floor] * len(cells), [cell.wanted for cell in cells], [rest] * len(cells)):
        wants = [max(0, goal - aim) if cell.heard else 0 for goal, aim, cell in zip(goals, aims, cells, strict=True)]
        aims = [aim + more for aim, more in zip(aims, _fill(rest - sum(aims), wants), strict=True)]
    return aims


def _grow(limit: int, cells: Sequence[_Cell], aims: Sequence[int], needs: Sequence[int]) -> list[_Cell]:
    """Shares as near to `aims` as possible; growth only out of what is free, for `needs` first: what another one got
    instead would be taken from it again in the next round. Silent gateways keep theirs."""
    if limit >= UNLIMITED:  # there may have been a limit before
        return [cell._replace(share=UNLIMITED, held=UNLIMITED) for cell in cells]
    free = max(0, limit - sum(cell.held for cell in cells))
    more = [0] * len(cells)
    for goals in (needs, aims):
        wants = [
            max(0, min(goal, aim) - cell.held - got) if cell.heard else 0
            for goal, aim, cell, got in zip(goals, aims, cells, more, strict=True)
        ]
        more = [got + extra for got, extra in zip(more, _fill(free - sum(more), wants), strict=True)]
    grown = []
    for cell, aim, extra in zip(cells, aims, more, strict=True):
        share = min(aim, cell.held + extra) if cell.heard else cell.share
        grown.append(_Cell(share, max(share, cell.held), cell.used, cell.wanted, cell.heard))
    return grown


def _fill(pool: int, wants: Sequence[int]) -> list[int]:
    """Max-min fair division: none gets more than it wants, and the unsatisfied all get the same."""
    if sum(wants) <= pool:
        return list(wants)
    given = [0] * len(wants)
    order = sorted(range(len(wants)), key=lambda index: wants[index])
    for served, index in enumerate(order):
        given[index] = min(wants[index], pool // (len(order) - served))
        pool -= given[index]
    return given
