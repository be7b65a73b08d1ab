"""Several gateways that share a tenant's limits, with a control that may lose sight of any of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.core.tenancy import Amounts, Lease, Limiter, Quota, Reservation, Tenant, allot, amounts

NAMES = ("g0", "g1", "g2", "g3")
NIGHT = 1e9


@dataclass
class Let:
    """A request that was let in, and what it has used."""

    gateway: str
    at: float
    day: int
    tokens: int
    stream: bool
    reservation: Reservation
    limiter: Limiter


class Cluster:
    """Gateways with clocks of their own, a control that may lose sight of any of them, and one tenant."""

    def __init__(self, limit: Quota, gateways: int) -> None:
        self.tenant = Tenant("t", limits=limit)
        self.limit = amounts(limit)
        self.names = NAMES[:gateways]
        self.now = 5000.0
        self.day = 1
        self.control_day = 1
        self.leases: Mapping[str, Lease] = {}
        self.up: dict[str, Limiter] = {}
        self.kept: dict[str, tuple[dict[str, Amounts], int, float]] = {}
        self.let: list[Let] = []
        self.open: list[Let] = []
        for name in self.names:
            self.start(name)

    def clock(self, name: str) -> float:
        return self.now * 1.0 + 777.25 * NAMES.index(name)

    def start(self, name: str) -> None:
        limiter = self.up[name] = Limiter([self.tenant], len(self.names))
        limiter.begin_day(self.day, NIGHT)
        used, day, at = self.kept.get(name, ({}, 0, 0.0))
        limiter.restore(used, day, self.now - at, self.clock(name))
        self.read(name)

    def save(self, name: str) -> None:
        limiter = self.up[name]
        self.kept[name] = limiter.used(self.clock(name)), limiter.day, self.now

    def kill(self, name: str) -> None:
        del self.up[name]
        self.open = [let for let in self.open if let.gateway != name]

    def read(self, name: str) -> None:
        if name in self.leases:
            self.up[name].take(self.leases[name], self.clock(name))

    def ask(self, name: str, tokens: int, stream: bool = False) -> bool:
        limiter = self.up[name]
        answer = limiter.reserve("t", tokens, stream, self.clock(name))
        if not isinstance(answer, Reservation):
            return False
        let = Let(name, self.now, limiter.day, tokens, stream, answer, limiter)
        self.let.append(let)
        self.open.append(let)
        return True

    def settle(self, let: Let, tokens: int) -> None:
        self.open.remove(let)
        let.tokens = tokens
        let.limiter.settle(let.reservation, tokens, self.clock(let.gateway))

    def look(self, heard: Iterable[str], reading: Iterable[str] = ()) -> None:
        """A round of control; some gateways read their last lease while it works on the next one."""
        demands = {name: self.up[name].demand(self.clock(name)) for name in heard if name in self.up}
        for name in reading:
            self.read(name)
        self.leases = allot(
            {"t": self.limit},
            demands,
            self.leases,
            gateways=self.names,
            day=self.control_day,
            now=self.now - 3000.0,
        )

    def used(self) -> Amounts:
        """By all gateways: in the last 60 s, open now, on the day that was used most of."""
        minute = [let.tokens for let in self.let if let.at > self.now - 60]
        days = [sum(let.tokens for let in self.let if let.day == day) for day in range(1, self.day + 1)]
        return Amounts(len(minute), sum(minute), sum(let.stream for let in self.open), max(days))

    def is_within(self) -> bool:
        return all(used <= limit for used, limit in zip(self.used(), self.limit, strict=True))

    def round(self, unheard: Iterable[str] = (), unread: Iterable[str] = (), late: Iterable[str] = ()) -> None:
        """A second: control hears gateways and answers, they read the answer; some do not, or late."""
        self.now += 1.0
        self.look((name for name in sorted(self.up) if name not in unheard), sorted(self.up.keys() & set(late)))
        for name in sorted(self.up):
            if name not in unread:
                self.read(name)
