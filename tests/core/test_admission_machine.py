"""Queue, breakers and retry budget together, against a naive model: nothing is lost, duplicated or left over."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.admission import AGE_S, Band, RequestQueue, Ticket, preempt
from forebay.core.resilience import Breaker, BreakerLimits, Outcome, RetryBudget, State, admissible

SIZE_MAX = 4
TIMEOUT_S = 60.0
ATTEMPTS_MAX = 3
LIMITS = BreakerLimits(failures_max=2, window=4, open_s=2.0, open_s_max=8.0, probes_max=1, successes_min=2)


@dataclass
class Row:
    """Where an item waits, in the plain list."""

    band: int
    front: bool
    deadline: float
    number: int
    tenant: str
    since: float


class PlainRoom:
    """The rules of the room, worked out anew at each question."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.counters: dict[tuple[int, str], float] = {}
        self.first: dict[tuple[int, str], int] = {}
        self.last: dict[int, str] = {}
        self.rose: dict[int, float] = {}
        self.number = 0

    def waiting(self, band: int, tenant: str | None = None) -> list[Row]:
        rows = [row for row in self.rows.values() if row.band == band and not row.front]
        return [row for row in rows if tenant in (None, row.tenant)]

    def least(self, band: int) -> float:
        counters = [self.counters[band, row.tenant] for row in self.waiting(band)]
        return min(counters) if counters else self.counters.get((band, self.last.get(band, "")), 0.0)

    def lift(self, band: int, tenant: str) -> None:
        self.counters[band, tenant] = max(self.counters.get((band, tenant), 0.0), self.least(band))

    def add(self, item: int, ticket: Ticket, front: bool, now: float, since: float | None = None) -> None:
        self.number += 1
        if not front and not self.waiting(ticket.band, ticket.tenant):
            self.lift(ticket.band, ticket.tenant)
            self.first[ticket.band, ticket.tenant] = self.number
        deadline = now + TIMEOUT_S if ticket.deadline == math.inf else ticket.deadline
        self.rows[item] = Row(
            ticket.band, front, deadline, self.number, ticket.tenant, now if since is None else since
        )

    def leave(self, item: int) -> None:
        del self.rows[item]

    def served(self, ticket: Ticket) -> None:
        if not self.waiting(ticket.band):
            self.lift(ticket.band, ticket.tenant)
        self.last[ticket.band] = ticket.tenant
        self.charge(ticket, ticket.work_tokens)

    def charge(self, ticket: Ticket, tokens: float) -> None:
        key = (ticket.band, ticket.tenant)
        self.counters[key] = self.counters.get(key, self.least(ticket.band)) + tokens

    def age(self, now: float) -> None:
        for band, age_s in AGE_S.items():
            old = [item for item, row in self.rows.items() if row.band == band and now - row.since >= age_s]
            if old and now - self.rose.get(band, -1e9) >= age_s:
                item = min(old, key=lambda i: (not self.rows[i].front, self.rows[i].since, self.rows[i].number))
                row = self.rows[item]
                self.leave(item)
                self.rows[item] = Row(band - 1, True, row.deadline, row.number, row.tenant, now)
                self.rose[band] = now

    def order(self) -> list[int]:
        def rank(item: int) -> tuple[float, ...]:
            row = self.rows[item]
            key = (row.band, row.tenant)
            fair = (-1.0, 0) if row.front else (self.counters[key], self.first[key])
            return (row.band, not row.front, *fair, row.deadline, row.number)

        return sorted(self.rows, key=rank)


@dataclass
class Request:
    """One client's request, and the attempt that is under way."""

    ticket: Ticket
    began: float = 0.0
    attempts: int = 0
    gave_way: bool = False
    replica: int = -1
    mark: int = -1
    since: float = 0.0
    answers: bool = False

    @property
    def band(self) -> Band:
        return self.ticket.band

    @property
    def yields(self) -> bool:
        return self.band is Band.BATCH or not (self.answers or self.gave_way)


class AdmissionMachine(RuleBasedStateMachine):
    """Two replicas with two places each."""

    def __init__(self) -> None:
        super().__init__()
        self.room: RequestQueue[int] = RequestQueue(SIZE_MAX, TIMEOUT_S)
        self.plain = PlainRoom()
        self.breakers = [Breaker(LIMITS), Breaker(LIMITS)]
        self.budget = RetryBudget(0.5, 0.1)
        self.requests: dict[int, Request] = {}
        self.running: list[int] = []
        self.done: dict[int, str] = {}
        self.now = 0.0

    def finish(self, item: int, how: str) -> None:
        assert item not in self.done, f"{self.done[item]}, then {how}"
        self.done[item] = how

    def some(self, which: int) -> tuple[int, Request]:
        item = self.running[which % len(self.running)]
        return item, self.requests[item]

    def stop(self, item: int, outcome: Outcome, used: float) -> Request:
        request = self.requests[item]
        self.running.remove(item)
        self.breakers[request.replica].end(request.mark, outcome, self.now)
        for room in (self.room, self.plain):
            room.charge(request.ticket, used - request.ticket.work_tokens)
        return request

    def again(self, item: int, since: float | None = None) -> None:
        ticket = self.requests[item].ticket
        self.room.enter_again(item, ticket, self.now, since)
        self.plain.add(item, ticket, True, self.now, since)

    @rule(
        band=st.sampled_from(Band),
        tenant=st.sampled_from("ab"),
        work=st.integers(0, 9),
        within_s=st.sampled_from([0.0, 5.0, 20.0, 500.0, math.inf]),
    )
    def enter(self, band: Band, tenant: str, work: int, within_s: float) -> None:
        item = len(self.requests)
        ticket = Ticket(band, tenant, work, self.now + within_s)
        self.requests[item] = Request(ticket, self.now)
        self.budget.request(self.now)
        full = len(self.room) >= SIZE_MAX
        refused = self.room.enter(item, ticket, self.now)
        assert (refused is not None) == full
        if refused is not None:
            self.finish(refused.item, refused.code)
            if refused.item == item:
                assert all(row.band <= band or row.front for row in self.plain.rows.values())
                return
            below = [row for row in self.plain.rows.values() if not row.front and row.band > band]
            loser = self.plain.rows[refused.item]
            assert loser in below
            assert loser.band == max(row.band for row in below)
            self.plain.leave(refused.item)
        self.plain.add(item, ticket, False, self.now)

    @rule()
    def dispatch(self) -> None:
        places = [at for at in (0, 1) if sum(self.requests[item].replica == at for item in self.running) < 2]
        open_to = [at for at in admissible(self.breakers, self.now) if at in places]
        if not open_to or not self.room:
            return
        item = next(iter(self.room))
        request = self.requests[item]
        self.running.append(item)
        for room in (self.room, self.plain):
            room.leave(item)
            room.served(request.ticket)
        request.replica, request.since, request.answers = open_to[0], self.now, False
        request.mark = self.breakers[open_to[0]].begin(self.now)
        request.attempts += 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def first_byte(self, which: int) -> None:
        self.some(which)[1].answers = True

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), used=st.integers(0, 20))
    def ok(self, which: int, used: int) -> None:
        item, _ = self.some(which)
        self.stop(item, Outcome.OK, used)
        self.room.rate.count(self.now)
        self.finish(item, "ok")

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def client_leaves_or_is_to_blame(self, which: int) -> None:
        item, _ = self.some(which)
        self.stop(item, Outcome.NEUTRAL, 1)
        self.finish(item, "neutral")

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def error(self, which: int) -> None:
        item, request = self.some(which)
        self.stop(item, Outcome.FAILED, 0)
        if not request.answers and request.attempts < ATTEMPTS_MAX and self.budget.allow(self.now):
            self.again(item)
        else:
            self.finish(item, "failed")

    @precondition(lambda self: self.room)
    @rule(which=st.integers(0, 9))
    def client_leaves_the_room(self, which: int) -> None:
        item = self.room.waiting()[which % len(self.room)]
        self.room.leave(item)
        self.plain.leave(item)
        self.finish(item, "left")

    @precondition(lambda self: self.running)
    @rule(band=st.sampled_from(Band))
    def preempt(self, band: Band) -> None:
        chosen = preempt([self.requests[item] for item in self.running], band)
        below = [self.requests[item] for item in self.running if self.requests[item].ticket.band > band]
        if chosen is None:
            assert not any(request.yields for request in below)
            return
        assert chosen in below
        assert chosen.yields
        item = next(item for item in self.running if self.requests[item] is chosen)
        self.stop(item, Outcome.NEUTRAL, 0)
        chosen.gave_way = True
        self.again(item, chosen.began)

    @rule(passed_s=st.sampled_from([0.1, 1.0, 4.0, 31.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        rows = self.plain.rows
        late = sorted((row.deadline, row.number, item) for item, row in rows.items() if row.deadline <= self.now)
        assert self.room.expire(self.now) == [item for *_, item in late]
        for *_, item in late:
            self.plain.leave(item)
            self.finish(item, "expired")
        self.room.rise(self.now)
        self.plain.age(self.now)

    @invariant()
    def the_room_and_the_plain_list_agree(self) -> None:
        assert self.room.waiting() == self.plain.order()
        rows = self.plain.rows
        assert all(self.room.band(item) == rows[item].band for item in rows)
        assert all(self.room.ahead(band) is any(row.band <= band for row in rows.values()) for band in Band)
        assert len(self.room) == len(self.plain.rows)

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        places = [*self.room, *self.running, *self.done]
        assert sorted(places) == list(range(len(self.requests)))

    @invariant()
    def probes_are_attempts_under_way(self) -> None:
        for at, breaker in enumerate(self.breakers):
            under_way = sum(self.requests[item].replica == at for item in self.running)
            assert 0 <= breaker.probes <= (under_way if breaker.state is State.HALF_OPEN else 0)

    def teardown(self) -> None:
        for item in list(self.running):
            self.stop(item, Outcome.NEUTRAL, 0)
            self.finish(item, "cancelled")
        for item in self.room.expire(math.inf):
            self.finish(item, "expired")
        assert sorted(self.done) == list(range(len(self.requests)))
        assert [breaker.probes for breaker in self.breakers] == [0, 0]
        assert self.room.waiting() == []
        assert len(self.room) == 0
        for line in self.room._bands:
            assert not any((line._arrivals, line._front_arrivals, line._front, line._tenants, line._ranks))
        assert not self.room._due


TestAdmission = AdmissionMachine.TestCase
