"""Queues requests, picks a replica for each, sends them there, and accounts for attempts and requests as they end."""

import asyncio
from collections.abc import Callable
from math import inf
from random import Random
from typing import Final

from forebay.core.admission import Band
from forebay.core.errors import CLIENT_CLOSED, OK, Code, Refusal
from forebay.core.model import Condition, GatewaySpec
from forebay.core.resilience import Outcome, RetryBudget, outcome_of
from forebay.core.routing import Chooser, Route, Shed, Wait, Why, choose
from forebay.gateway.account import UNREPORTED
from forebay.gateway.dispatch.dispatching import Dispatcher, missing_revision
from forebay.gateway.dispatch.fallback import fall_back, fall_back_all, fall_back_or_reject
from forebay.gateway.fleet import Served
from forebay.gateway.link import BATCH, RESTARTING
from forebay.gateway.records import entries
from forebay.gateway.records.estimates import estimate_usage
from forebay.gateway.records.facts import Used, used
from forebay.gateway.requests.relay import Relay
from forebay.gateway.requests.state import BYTES
from forebay.gateway.rollout.arms import choose_by_arm, kind_of, report, sent
from forebay.gateway.rollout.reporting import Observations
from forebay.gateway.scheduling.choosing import choose_replica
from forebay.gateway.scheduling.hedging import HEDGED, Hedge, begin_hedge, end_hedge
from forebay.gateway.scheduling.holding import LOOK_MAX, hold, overtakes
from forebay.gateway.scheduling.late import drop_late, out_of_time
from forebay.gateway.scheduling.learning import learn
from forebay.gateway.scheduling.preemption import preempt_batch, preempt_lower, preempt_queued
from forebay.gateway.scheduling.retrying import retry
from forebay.gateway.tensor.answers import CODES
from forebay.obs.clock import random_hex
from forebay.wire.records import Attempt

_DEFAULT: Final = Band.DEFAULT  # looked up once: access to enum members is slow
_OK: Final = Outcome.OK
_FAILED: Final = Outcome.FAILED
_NO_ROOM: Final = (Why.FULL, Why.SESSION_FULL)


class Scheduler:
    """The requests of all models, queued and in flight, and the replicas that they may go to."""

    def __init__(self, spec: GatewaySpec, log: entries.RequestLog, rng: Random) -> None:
        self.served: dict[str, Served] = {}
        """The models, by name. `polling.Fleet` adds and removes them and their replicas."""
        self.removed: list[Served] = []
        """Models that are not served any more, with requests that may finish."""
        self.dispatcher = Dispatcher()
        self.log = log
        self.rng = rng
        self.retries_max = spec.retries_max
        self.response_buffer_bytes_max = spec.response_buffer_bytes_max
        self.chooser: Chooser = choose
        self.budget = RetryBudget()
        self.observations = Observations(random_hex(8))
        self._attempts = 0
        """Number of attempts sent."""
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.born = loop.time()
        self._later = loop.call_later
        self.reload: Callable[[], None] = lambda: None
        """Loads a newer snapshot, if there is one."""

    # --- queueing and routing

    def admit(self, relay: Relay) -> None:
        """Send a new request to a replica or a fallback model, queue it, or reject it."""
        served, now = relay.served, relay.began
        self.budget.request(now)
        if served.routes.fallback and not served.ready and fall_back(self, relay, Condition.DOWN):
            return
        if served.freed and served.waiting.full:  # first, so that no request is rejected needlessly
            self.pump(served)
        choice = self.place(relay)
        ahead = relay.slotless or not (served.waiting and overtakes(relay))  # the queued ones cannot go there
        relay.slotless = False  # if it has to be queued, now or later, it waits like any other
        if ahead and isinstance(choice, Route):
            self.send(relay, choice)
            if served.freed and served.waiting:
                self.pump(served)
            return
        refused = served.waiting.enter(relay, relay.ticket, now)
        if refused is not None:
            fall_back_or_reject(self, refused.item, Refusal(refused.code), refused.retry_after_s)
        stays = (refused is None or refused.item is not relay) and relay.link is None and relay.ticket.last > now
        if stays and isinstance(choice, Wait) and choice.why in _NO_ROOM:
            preempt_lower(self, relay, choice)

    def place(self, relay: Relay) -> Route | Wait | Shed:
        """Choose a replica, after preempting batch work there if needed."""
        choice = self.choose(relay)
        if isinstance(choice, Wait) and choice.why is Why.BEST_FULL:
            choice = hold(self, relay, choice)
        if relay.slotless:
            return choice
        if relay.served.running[BATCH] and relay.ticket.band < BATCH:
            choice = preempt_batch(self, relay, choice)
        if relay.ticket.band < _DEFAULT and isinstance(choice, Route):
            preempt_queued(self, relay, relay.served.links[choice.at])
        return choice

    def choose(self, relay: Relay) -> Route | Wait | Shed:
        """Choose a replica by session, rollout arm and policy."""
        served, routing = relay.served, relay.routing
        if routing is not None and routing.stays:  # looked up now: its session may have moved while it was queued
            served.homes.detect_losses(served.links)
            routing.home = served.homes.find(routing.key)
        split = served.split
        if split is None or relay.revision:
            return choose_replica(self, relay, relay.tried)
        return choose_by_arm(self, relay, split)

    def send(self, relay: Relay, route: Route) -> None:
        """Start an attempt at the replica of `route`, and account for it."""
        served, now = relay.served, self.now()
        links = served.links  # a snapshot applied meanwhile replaces the list
        link = links[route.at]
        relay.run_on(link)  # written at once; no response is processed before the rest of this is done
        relay.waited(now)
        if self.log.records:
            relay.candidates = entries.candidates(links, route)  # loads as the choice saw them
            relay.report_age_s = now - link.heard_at
            relay.hit = served.source(link, relay.routing, route.hit_tokens)
        self._attempts += 1
        link.begin_attempt(relay, self._attempts)
        served.running[relay.ticket.band] += 1
        served.waiting.served(relay.ticket)
        relay.route = route
        relay.since = now
        relay.mark = link.breaker.begin(now)
        if relay.routing is not None:
            relay.charge = served.pricing.sent(link.meter, relay.routing, route.hit_tokens, relay.streams, now)
            if relay.routing.stays:
                served.homes.settle(relay.routing.key, link.id)
        if served.split is not None:
            sent(self, relay, link, served.split)
        if relay.hedge_after_s and now + relay.hedge_after_s < relay.ticket.last:
            self._call_later(relay, relay.hedge_after_s, begin_hedge)
        else:
            self.watch_deadline(relay, now)

    def watch_deadline(self, relay: Relay, now: float) -> None:
        """Reject a stream at its deadline if it has not begun by then."""
        if relay.streams and relay.ticket.last < inf and not relay.exchange.started:
            self._call_later(relay, relay.ticket.last - now, out_of_time)

    def _call_later(self, relay: Relay, seconds: float, call: Callable[["Scheduler", Relay], None]) -> None:
        if relay.timer is not None:
            relay.timer.cancel()
        relay.timer = self._later(seconds, call, self, relay)

    def pump(self, served: Served) -> None:
        """Send queued requests, in order, as long as there is room."""
        if served.pumping:  # a request rejected below calls this again when it ends: the recursion could get too deep
            return
        served.pumping, served.freed = True, False
        stuck: dict[tuple[object, ...], bool] = {}
        try:
            drop_late(self, served)
            while served.waiting and self._send_next(served, stuck):
                if served.troubled:  # once the last half-open breaker has its probe, all others are admitted
                    stuck.clear()
        finally:
            served.pumping = False

    def _send_next(self, served: Served, stuck: dict[tuple[object, ...], bool]) -> bool:
        """Send or reject the first queued request that need not wait any longer; False if there is none.

        `stuck` holds the kinds that have to wait: within one round replicas only get fuller. True: the first of that
        kind waits for one particular replica, which does not block the rest; each further one counts to `LOOK_MAX`,
        as does each session that is alone in its kind.
        """
        waiting, left = served.waiting, LOOK_MAX
        for relay in waiting:
            routing, tried, revision, ticket = relay.routing, relay.tried, relay.revision, relay.ticket
            key = routing.key if routing is not None and routing.stays else 0
            home = served.homes.find(key) if key else ""
            kind = (revision, tried, home or key, relay.mid_sequence, kind_of(relay))
            held = stuck.get(kind)
            if held is not None:
                if held:
                    left -= 1
                    if not left:
                        return False
                continue
            band = waiting.band(relay)
            if band is not None and band < ticket.band:  # promoted by its age, permanently
                relay.ticket = ticket.risen(band)
            choice = self.place(relay)
            if isinstance(choice, Wait):
                held = choice.why is Why.BEST_FULL or served.split is not None
                if not (tried or revision or served.troubled or held or choice.why is Why.SESSION_FULL):
                    return False  # then no other request can be sent either
                alone = choice.why is Why.SESSION_FULL and served.links[choice.at].id != home
                left -= alone
                if not left:
                    return False
                if not (alone and home):  # the others of a home that is of no use are spread over the other replicas
                    stuck[kind] = held  # others may be able to use replicas that this one cannot
                continue
            if isinstance(choice, Shed) and served.doubt_lost(tried):
                return True  # look at it again: a replica that it tried may be dead
            waiting.leave(relay)
            if isinstance(choice, Route):
                self.send(relay, choice)
            else:
                gone = missing_revision(served, revision)  # since the request was admitted
                problem = relay.problem or gone or Refusal(Code.REPLICA_LOST, choice.why)
                fall_back_or_reject(self, relay, problem, choice.retry_after_s, Condition.DOWN)
            return True
        return False

    def expire(self) -> None:
        """Reject requests that have waited too long, and send those that can go."""
        now = self.now()
        for served in self.served.values():
            served.refresh(now)
            if not served.waiting:
                continue
            drop_late(self, served)
            served.waiting.rise(now)
            if served.routes.fallback:
                fall_back_all(self, served, now)
            self.pump(served)

    def close(self) -> None:
        """The process is exiting: every request without its whole answer ends with an error."""
        for served in (*self.served.values(), *self.removed):
            links = (*served.links, *served.leaving)
            attempts = [relay for link in links for relay in link.attempts if not isinstance(relay, Hedge)]
            for relay in (*served.waiting.waiting(), *attempts):
                served.waiting.leave(relay)  # as in `out_of_time`
                relay.give_up()
                relay.refuse(entries.stopped(begun=relay.exchange.started), 1)

    # --- attempts and requests that end

    def attempt_failed(self, relay: Relay, reason: str, problem: Refusal) -> None:
        """An attempt failed before anything was sent to the client, or a stream broke and can be resumed."""
        link, now = relay.link, self.now()
        assert link is not None
        outcome = outcome_of(Code(reason)) if reason in CODES else Outcome.FAILED
        link.broke_off(reason, now)  # before its next load report: new requests rely on it
        if relay.side is not None:
            report(self, relay, reason if reason in CODES else problem.code.value, outcome, now)
        if relay.hedge is not None:  # the hedge takes over from the failed attempt
            self.end_hedge(relay, won=True, reason=reason, outcome=outcome)
            return
        renewed = reason in RESTARTING and not any(each.outcome in RESTARTING for each in relay.attempts)
        relay.attempts += (Attempt(link.id, relay.why, reason, now - relay.since),)
        self.end_attempt(relay, outcome, now)
        begun, failed = relay.exchange.started, (link.id, link.generation)
        if not begun:  # of a whole answer that was cut off the client gets nothing
            relay.usage = UNREPORTED
        if begun or not renewed:  # the replaced engine may get it once more; a second crash is no coincidence
            relay.tried = (*relay.tried, failed) if relay.stuck or not begun else (failed,)
        retry(self, relay, reason, problem, now)

    def attempt_rejected(self, relay: Relay, code: str, now: float) -> None:
        """A replica responded with an error that is not the client's: a fallback model cannot serve the request, or a
        stream cannot go on there."""
        link, outcome = relay.link, outcome_of(Code(code))
        assert link is not None
        if relay.side is not None:
            report(self, relay, code, outcome, now)
        relay.attempts += (Attempt(link.id, relay.why, code, now - relay.since),)
        self.end_attempt(relay, outcome, now)

    def end_hedge(self, relay: Relay, *, won: bool, reason: str = HEDGED, outcome: Outcome = Outcome.NEUTRAL) -> None:
        """Drop one of its two attempts: the first if the hedge `won`, else the hedge."""
        end_hedge(self, relay, won, reason, outcome)

    def end_attempt(self, relay: Relay, outcome: Outcome, now: float, tokens: int = 0) -> bool:
        """End an attempt in all accounts; `tokens` is what it used. False if there was none."""
        link, served = relay.link, relay.served
        if link is None or not link.end_attempt(relay):
            return False
        relay.free_at = now
        served.running[relay.ticket.band] -= 1
        if relay.charge is not None:
            relay.charge.release()
        link.breaker.end(relay.mark, outcome, now)
        served.freed = True
        served.troubled |= outcome is _FAILED
        served.waiting.charge(relay.ticket, tokens - relay.ticket.work_tokens)
        return True

    def end_request(self, relay: Relay, code: str, status: int, now: float) -> None:
        """Account for a request that has ended, and release its slot to the next one."""
        if relay.timer is not None:
            relay.timer.cancel()
            relay.timer = None
            if relay.hedge is not None:
                self.end_hedge(relay, won=False)
        served, link = relay.served, relay.link
        served.stay_s += now - relay.arrived
        estimate = served.lengths.tokens(relay.prompt_bytes)
        spent = estimate_usage(relay, code, now) or used(relay.reported, relay.begun, relay.events, estimate)
        work = spent.prompt + spent.completion
        if relay.plain and relay.reported is None and (code == OK or relay.mode == BYTES):
            spent = Used(served.lengths.tokens(relay.text_bytes), 0, 0, estimated=True)
        if code == OK:
            work = work or (estimate if relay.plain else 0)  # without tokens, fair sharing goes by size
            learn(relay, now, estimate)
            outcome = _OK
        else:
            outcome = Outcome.NEUTRAL if code == CLIENT_CLOSED else outcome_of(Code(code))
        if relay.side is not None:
            report(self, relay, code, outcome, now)
        if self.end_attempt(relay, outcome, now, work):
            assert link is not None
            relay.attempts += (Attempt(link.id, relay.why, code, now - relay.since),)
            served.waiting.rate.count(now)
        else:  # queued, or about to be; a broken stream has still used tokens
            relay.waited(now)
            served.waiting.leave(relay)
            served.waiting.charge(relay.ticket, work)
        served.account.spent(spent)
        if relay.admitted is not None:
            relay.admitted.settle(spent.prompt + spent.completion, now)
        self.log.ended(relay, entries.End(relay, code, status, spent, now))
        if served.waiting:
            self.pump(served)
