"""One gateway process's rate limiting: tokens are reserved as an estimate and settled as actual usage.

A minute is a sliding window: 60 whole seconds and the current one, so that no 60 s ever hold more than the share. A
request's usage counts at the time of its reservation; usage beyond its estimate counts when it becomes known.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from forebay.core.errors import Code
from forebay.core.tenancy.keys import Denied, Tenant
from forebay.core.tenancy.shares import (
    LEASE_S,
    ROUND_S,
    UNLIMITED,
    Amounts,
    Asked,
    Demand,
    Lease,
    amounts,
    equal_part,
    within,
)

SLOTS: Final = 61
DAY_S: Final = 86_400
SET_BACK_S_MAX: Final = 3600.0
"""A clock that is set back by more, over midnight, had been set to the next day by mistake."""
LACK_S: Final = 30.0
"""How long a rejected request is expected to be retried: longer than most clients' back-off."""
_REQUESTS, _TOKENS, _STREAMS, _DAY_TOKENS = range(4)
_WORDING: Final = (
    (Code.RATE_LIMITED, "none", "requests per minute"),
    (Code.RATE_LIMITED, "not enough", "tokens per minute"),
    (Code.STREAMS_LIMIT, "none", "streams"),
    (Code.BUDGET_EXCEEDED, "not enough", "tokens per day (UTC)"),
)
"""Error code and wording per limit, in the order of `Amounts`."""


class _Window:
    """A sum over the last minute, in slots of one second; no slot is ever negative."""

    __slots__ = ("slots", "total")

    def __init__(self) -> None:
        self.slots = [0] * SLOTS
        self.total = 0

    def add(self, second: int, amount: int) -> None:
        self.slots[second % SLOTS] += amount
        self.total += amount

    def roll(self, last: int, second: int) -> None:
        for passed in range(max(last, second - SLOTS) + 1, second + 1):
            index = passed % SLOTS
            self.total -= self.slots[index]
            self.slots[index] = 0

    def frees_at(self, amount: int, second: int) -> int:
        """The second from which the window holds `amount` less. `amount` is at most `total`."""
        for slot in range(second - SLOTS + 1, second):
            amount -= self.slots[slot % SLOTS]
            if amount <= 0:
                return slot + SLOTS
        return second + SLOTS

    def empty_at(self, second: int) -> int:
        """The second from which nothing that is in the window now remains; the window is not empty."""
        while not self.slots[second % SLOTS]:
            second -= 1
        return second + SLOTS


class _Usage:
    """One tenant at this gateway."""

    __slots__ = (
        "day_tokens", "ended", "inherited", "lacked_at", "lacks", "lacks_since", "left", "limit", "name", "part",
        "refused_requests", "refused_streams", "refused_tokens", "requests", "second", "share", "streams",
        "streams_since", "tokens",
    )  # fmt: skip

    def __init__(self, tenant: Tenant, gateways: int) -> None:
        self.name = tenant.name
        self.limit = amounts(tenant.limits)
        self.share = self.part = equal_part(self.limit, gateways)
        self.left = self.limit
        """What no gateway has used, by the last lease; the whole limit before there is one."""
        self.second = 0
        self.streams = 0
        self.inherited = 0
        """Of these, streams open at a draining process that this one replaced."""
        self.streams_since = 0
        """Since when at least one stream was always open."""
        self.day_tokens = 0
        self.requests = _Window()
        self.tokens = _Window()
        self.refused_requests = _Window()
        self.refused_tokens = _Window()
        self.refused_streams = _Window()
        self.ended = _Window()
        self.lacks: Amounts | None = None
        """Needs of the largest recently rejected request, unless one as large was admitted since."""
        self.lacked_at = 0
        self.lacks_since = 0
        """When the first of the rejections that `lacks` covers happened."""

    def roll(self, second: int) -> None:
        """Advance to another second."""
        windows = (
            self.requests, self.tokens, self.refused_requests, self.refused_tokens, self.refused_streams, self.ended,
        )  # fmt: skip
        for window in windows:
            if window.total:
                window.roll(self.second, second)
        self.second = second

    def change_limit(self, limit: Amounts, gateways: int) -> None:
        """Apply another limit. Of several gateways, each has its share of a raised one until the next lease, and of
        a lowered one at most an equal part."""
        part, share, left = equal_part(limit, gateways), list(self.share), list(self.left)
        for index, (before, total) in enumerate(zip(self.limit, limit, strict=True)):
            if total == before:
                continue
            left[index] = total
            if total >= UNLIMITED or gateways == 1:
                share[index] = part[index]
            elif total < before:
                share[index] = min(share[index], part[index])
        self.limit, self.part, self.share, self.left = limit, part, Amounts(*share), Amounts(*left)

    def fall_back(self) -> None:
        """Without contact to control: limit the per-minute shares, which control reclaims, to an equal part."""
        share, part = self.share, self.part
        self.share = share._replace(
            requests=min(share.requests, part.requests), tokens=min(share.tokens, part.tokens)
        )

    def refuse(self, tokens: int, stream: bool) -> None:
        """Record a rejected demand."""
        self.refused_requests.add(self.second, 1)
        self.refused_tokens.add(self.second, tokens)
        self.refused_streams.add(self.second, stream)
        lacks = self.lacking()
        if lacks is None:
            self.lacks_since = self.second
        if lacks is None or tokens >= lacks.tokens:
            self.lacks, self.lacked_at = Amounts(1, tokens, int(stream), tokens), self.second

    def lacking(self) -> Amounts | None:
        """`lacks`, while a retry is likely."""
        return self.lacks if self.second - self.lacked_at <= LACK_S else None

    def used(self) -> Amounts:
        return Amounts(self.requests.total, self.tokens.total, self.streams, self.day_tokens)

    def asked(self) -> Asked:
        tokens = self.tokens.total + self.refused_tokens.total
        wanted = Amounts(
            self.requests.total + self.refused_requests.total,
            tokens,
            self.streams + self.refused_streams.total,
            self.day_tokens + tokens,
        )
        return Asked(self.share, self.used(), wanted)


Left = tuple[int, int, int, int]
"""What this gateway may still hand out of a tenant's requests per minute, in how many seconds they are all available
again, and the same of its tokens. Made for every response: four numbers cost a fraction of anything named."""


class Reservation:
    """A request's reserved usage; settled exactly once, however the request ends."""

    __slots__ = ("day", "second", "settled", "stream", "tokens", "usage")

    def __init__(self, usage: _Usage, tokens: int, stream: bool, day: int) -> None:
        self.usage = usage
        self.tokens = tokens
        self.stream = stream
        self.second = usage.second
        self.day = day
        self.settled = False


class Limiter:
    """Counts tenants' usage at this gateway, one of `gateways`. `now` is a monotonic clock in seconds."""

    __slots__ = ("_alone", "_day_ends_at", "_gateways", "_lease_until", "_usage", "day")

    def __init__(self, tenants: Iterable[Tenant], gateways: int = 1) -> None:
        self._gateways = gateways
        self._usage = {tenant.name: _Usage(tenant, gateways) for tenant in tenants}
        self._lease_until = math.inf
        self._alone = False
        """Contact with control was lost."""
        self._day_ends_at = 0.0
        self.day = 0

    def reserve(self, tenant: str, tokens: int, stream: bool, now: float) -> Reservation | Denied:
        """Admit a request that will use `tokens` at most, or say why not and when it may be retried."""
        if now >= self._lease_until:
            self._fall_back()
        usage = self._usage[tenant]
        second = int(now)
        if second > usage.second:
            usage.roll(second)
        share = usage.share
        requests, window = usage.requests, usage.tokens
        if (
            requests.total >= share.requests
            or (tokens and (window.total + tokens > share.tokens or usage.day_tokens + tokens > share.day_tokens))
            or (stream and usage.streams >= share.streams)
        ):
            return self._denied(usage, tokens, stream, now)
        if usage.lacks is not None and tokens >= usage.lacks.tokens:
            usage.lacks = None
        slot = usage.second % SLOTS
        requests.slots[slot] += 1
        requests.total += 1
        window.slots[slot] += tokens
        window.total += tokens
        usage.day_tokens += tokens
        if stream:
            if not usage.streams:
                usage.streams_since = usage.second
            usage.streams += 1
        return Reservation(usage, tokens, stream, self.day)

    def settle(self, reservation: Reservation, tokens: int, now: float) -> None:
        """The request has ended and has used `tokens`; 0 if it never ran."""
        assert not reservation.settled, "a reservation is settled once"
        reservation.settled = True
        usage = reservation.usage
        second = int(now)
        if second > usage.second:
            usage.roll(second)
        more = tokens - reservation.tokens
        if more > 0:
            usage.tokens.add(usage.second, more)
        elif reservation.second > usage.second - SLOTS:
            usage.tokens.add(reservation.second, more)
        if reservation.day == self.day:
            usage.day_tokens += more
        if reservation.stream:
            usage.streams -= 1
            usage.ended.add(usage.second, 1)

    def limit(self, tenant: str) -> Amounts:
        """A tenant's limits, of all gateways together."""
        return self._usage[tenant].limit

    def minute(self, tenant: str, now: float) -> Left:
        """The remaining requests and tokens per minute of a tenant. Meaningless where it has no such limit."""
        usage = self._usage[tenant]
        second = int(now)
        if second > usage.second:
            usage.roll(second)
        requests, tokens, share = usage.requests, usage.tokens, usage.share
        requests_left, tokens_left = share.requests - requests.total, share.tokens - tokens.total
        return (
            requests_left if requests_left > 0 else 0,
            math.ceil(requests.empty_at(usage.second) - now) if requests.total else 0,
            tokens_left if tokens_left > 0 else 0,
            math.ceil(tokens.empty_at(usage.second) - now) if tokens.total else 0,
        )

    def configure(self, tenants: Iterable[Tenant]) -> None:
        """Apply other limits, and add new tenants. What removed ones have used is kept: they may return."""
        for tenant in tenants:
            usage = self._usage.get(tenant.name)
            if usage is None:
                self._usage[tenant.name] = _Usage(tenant, self._gateways)
            else:
                usage.change_limit(amounts(tenant.limits), self._gateways)

    # --- the day, and leases from control

    def begin_day(self, day: int, ends_at: float) -> None:
        """Set the current day (counted from the epoch) and when, on the clock of `now`, it ends."""
        if day == self.day - 1:
            if ends_at + DAY_S - self._day_ends_at > SET_BACK_S_MAX:  # it was wrong before: what was used is of today
                self.day, self._day_ends_at = day, ends_at
            else:  # a clock set back over midnight must not grant the day's tokens twice
                self._day_ends_at = ends_at + DAY_S
            return
        self._day_ends_at = ends_at
        if day == self.day:
            return
        self.day = day
        for usage in self._usage.values():
            usage.day_tokens = 0
            usage.share = usage.share._replace(day_tokens=usage.part.day_tokens)
            usage.left = usage.left._replace(day_tokens=usage.limit.day_tokens)

    def take(self, lease: Lease, now: float) -> None:
        """Apply a lease. One from the future, from another boot of the machine, counts as expired."""
        today = lease.day == self.day
        for name, share in lease.shares.items():
            usage = self._usage.get(name)
            if usage is not None:
                left = lease.left.get(name, usage.left)
                fits = within(share, usage.limit)
                usage.share = fits if today else fits._replace(day_tokens=usage.share.day_tokens)
                usage.left = left if today else left._replace(day_tokens=usage.left.day_tokens)
        self._alone = False
        self._lease_until = lease.asked_at + LEASE_S if lease.asked_at <= now else now
        if now >= self._lease_until:
            self._fall_back()

    def demand(self, now: float) -> Demand:
        """The report for control."""
        if now >= self._lease_until:
            self._fall_back()
        limited = [usage for usage in self._usage.values() if min(usage.limit) < UNLIMITED]
        for usage in limited:
            usage.roll(max(usage.second, int(now)))
        refused = {usage.name: lacks for usage in limited if (lacks := usage.lacking()) is not None}
        lacking_s = {usage.name: usage.second - usage.lacks_since for usage in limited if usage.name in refused}
        return Demand(now, self.day, {usage.name: usage.asked() for usage in limited}, refused, lacking_s)

    # --- across a restart

    def used(self, now: float) -> dict[str, Amounts]:
        """The usage of every tenant that has any, to be saved and given to `restore`.

        Streams are those open in this process.
        """
        for usage in self._usage.values():
            usage.roll(max(usage.second, int(now)))
        used = {
            usage.name: usage.used()._replace(streams=usage.streams - usage.inherited)
            for usage in self._usage.values()
        }
        return {name: each for name, each in used.items() if any(each)}

    def inherit(self, streams: Mapping[str, int], now: float) -> None:
        """Count the open streams of draining processes that this one has replaced."""
        for usage in self._usage.values():
            more = streams.get(usage.name, 0) - usage.inherited
            if not more:
                continue
            usage.roll(max(usage.second, int(now)))
            if not usage.streams:
                usage.streams_since = usage.second
            usage.inherited += more
            usage.streams += more
            usage.ended.add(usage.second, max(0, -more))

    def amend(self, more: Mapping[str, Amounts], now: float) -> None:
        """Add what an earlier process says of requests that it got since its counts were restored here, and of those
        in flight: the day's tokens may also become fewer. Streams come through `inherit`."""
        for name, each in more.items():
            usage = self._usage.get(name)
            if usage is None:
                continue
            usage.roll(max(usage.second, int(now)))
            usage.requests.add(usage.second, max(0, each.requests))
            usage.tokens.add(usage.second, max(0, each.tokens))
            usage.day_tokens = max(0, usage.day_tokens + each.day_tokens)

    def restore(self, used: Mapping[str, Amounts], day: int, age_s: float, now: float) -> None:
        """Restore the usage saved `age_s` ago on that day by the previous process. Its streams come through
        `inherit`."""
        then = int(now - max(0.0, age_s))
        for name, before in used.items():
            usage = self._usage.get(name)
            if usage is None:
                continue
            usage.roll(max(usage.second, int(now)))
            if then > usage.second - SLOTS:
                usage.requests.add(then, before.requests)
                usage.tokens.add(then, before.tokens)
            if day == self.day:
                usage.day_tokens += before.day_tokens

    # --- rejections

    def _fall_back(self) -> None:
        self._lease_until = math.inf
        self._alone = True
        for usage in self._usage.values():
            usage.left = usage.limit  # other gateways' usage since then is unknown
            usage.fall_back()

    def _denied(self, usage: _Usage, tokens: int, stream: bool, now: float) -> Denied:
        """The limit that will block the request for longest."""
        limit, share = usage.limit, usage.share
        for code, most, span in (
            (Code.RATE_LIMITED, limit.tokens, "minute"),
            (Code.BUDGET_EXCEEDED, limit.day_tokens, "day"),
        ):
            if tokens > most:
                text = f"The request may use {tokens} tokens, but tenant `{usage.name}` has {most} for a whole {span}"
                text += ": name a lower limit of the answer (`max_tokens`), or shorten the prompt."
                return Denied(code, text)
        usage.refuse(tokens, stream)
        ways = []
        if usage.requests.total >= share.requests:
            ways.append((_REQUESTS, 1, _wait_s(usage, usage.requests, 1, share.requests, now)))
        if tokens and usage.tokens.total + tokens > share.tokens:
            ways.append((_TOKENS, tokens, _wait_s(usage, usage.tokens, tokens, share.tokens, now)))
        if tokens and usage.day_tokens + tokens > share.day_tokens:
            ways.append((_DAY_TOKENS, tokens, max(1, math.ceil(self._day_ends_at - now))))
        if stream and usage.streams >= share.streams:
            lasted_s = min(max(1, usage.second - usage.streams_since), SLOTS - 1)
            ways.append((_STREAMS, 1, math.ceil(lasted_s / max(1, usage.ended.total))))
        denials = [self._denial(usage, *way) for way in ways]
        return max(denials, key=lambda denied: denied.retry_after_s)

    def _denial(self, usage: _Usage, kind: int, amount: int, wait_s: int) -> Denied:
        """One limit blocks the request, for `wait_s` by this gateway's counts: the limit or only the share is used
        up."""
        code, left, what = _WORDING[kind]
        limit = usage.limit[kind]
        if amount > min(usage.left[kind], limit - usage.used()[kind]):
            return Denied(code, f"Tenant `{usage.name}` has {left} left of its {limit} {what}.", wait_s)
        text = f"This gateway has {left} left of its share of the {limit} {what} of tenant `{usage.name}`"
        if self._alone:
            return Denied(code, f"{text}, and cannot reach control, which could raise its share.", wait_s)
        if code is Code.BUDGET_EXCEEDED:
            code = Code.RATE_LIMITED  # clients take that code for the end of the day's quota
        text += (
            ". The tenant has more: shares follow within seconds what is asked for, and a new connection may reach"
        )
        text += " another gateway. Please try again."
        return Denied(code, text, min(ROUND_S, wait_s))


def _wait_s(usage: _Usage, window: _Window, amount: int, share: int, now: float) -> int:
    """Whole seconds until enough has left the window; a share that is too small at all may grow later."""
    if amount > share:
        return math.ceil(LEASE_S)
    return math.ceil(window.frees_at(window.total + amount - share, usage.second) - now)
