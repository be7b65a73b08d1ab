"""The request loop: parse a request, queue it, pick a replica, relay the response, retry elsewhere, settle."""

import asyncio
from collections.abc import Callable
from math import inf
from random import Random
from typing import Final

from forebay.core.dispatch import Chosen
from forebay.core.errors import CLIENT_CLOSED, OK, TABLE, Code, Refusal
from forebay.core.model import Condition, GatewaySpec, Policy, Sessions, Snapshot, Task
from forebay.core.resilience import Outcome, RetryBudget, outcome_of
from forebay.core.routing import Chooser, Route, Shed, Wait, Why, choose
from forebay.core.routing.meter import DECODE_TOKENS_MIN
from forebay.core.tenancy import ANONYMOUS, Denied, Granted
from forebay.gateway.account import Account
from forebay.gateway.admission.holding import LOOK_MAX, hold, overtakes
from forebay.gateway.admission.preemption import PATIENCE_S, preempt_batch, preempt_lower
from forebay.gateway.asking import Ids, expected_tokens, make_ask, make_ticket, most_tokens, session_of
from forebay.gateway.dispatch.choosing import among
from forebay.gateway.dispatch.dispatching import Dispatcher, addressed, check_revision, read, serving
from forebay.gateway.dispatch.endpoints import Endpoint
from forebay.gateway.dispatch.fallback import fall_back, fall_back_all, fall_back_or_reject
from forebay.gateway.fleet import BATCH, GOING, RESTARTING, Link, Served
from forebay.gateway.hedging import HEDGED, Hedge, begin_hedge, end_hedge
from forebay.gateway.pressure.late import drop_late, out_of_time
from forebay.gateway.records import entries
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.estimates import estimate_usage, learn_answer
from forebay.gateway.records.facts import Used, used
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.relay import Relay
from forebay.gateway.rollout.arms import choose_by_arm, kind_of, report, sent
from forebay.gateway.rollout.reporting import Observations
from forebay.gateway.tenancy import AccessControl, Admitted, DeniedRefusal, credential
from forebay.gateway.tensor.answers import CODES
from forebay.net.server import Exchange
from forebay.obs.clock import random_hex
from forebay.obs.metrics import UNKNOWN, Metrics
from forebay.wire import http1
from forebay.wire.apis.wanted import CODING, Wanted, coded, wanted
from forebay.wire.errors import error_body, id_headers
from forebay.wire.records import Attempt

COUNTING: Final = frozenset({Policy.ROUND_ROBIN, Policy.LEAST_REQUESTS, Policy.P2C})
"""Policies that ignore the prompt."""
RESUMES_MAX: Final = 16
"""How often a stream may be resumed on another replica: more than retries, as it had a slot and its client waits."""
STUCK_MAX: Final = 3
"""Consecutive resumes without one event in between: such a request may be what crashes the engines."""
_CHAT: Final = Task.CHAT  # looked up once: access to enum members is slow
_TENSOR: Final = Task.TENSOR
_NO_SESSIONS: Final = Sessions.OFF
_COOKIE: Final = Sessions.COOKIE
_OK: Final = Outcome.OK
_FAILED: Final = Outcome.FAILED
_OVER_BUDGET: Final = Shed(Code.REQUEST_FAILED, Why.ALL_TRIED, retry_after_s=1)


class Gateway:
    """The requests of the public listener, queued and in flight. `polling.Fleet` adds and removes replicas."""

    def __init__(
        self, spec: GatewaySpec, metrics: Metrics, log: AccessLog, rng: Random, recorder: Recorder | None = None
    ) -> None:
        self.served: dict[str, Served] = {}
        self.snapshot: Snapshot | None = None
        self.dispatcher = Dispatcher()
        self.response_buffer_bytes_max = spec.response_buffer_bytes_max
        self._retries_max = spec.retries_max
        self._metrics, self._log = metrics, log
        self.rng = rng
        self.access: AccessControl | None = None
        """Checks API keys and limits; None: no authentication, anyone may use any model."""
        self._recorder = recorder
        self.keeps_prompts = recorder is not None and recorder.prompts
        self._turn = 0
        self.chooser: Chooser = choose
        self.budget = RetryBudget()
        instance = random_hex(8)
        self.observations = Observations(instance)
        self.id_of = Ids(instance.encode()).of
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.born = loop.time()
        self._later = loop.call_later
        self.look: Callable[[], None] = lambda: None
        """Loads a newer snapshot, if there is one."""

    def account(self, model: str) -> Account:
        """The metrics of a configured model."""
        return Account(self._metrics, model)

    # --- incoming requests

    def handle(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Serve an inference request."""
        request_id = self.id_of(exchange)
        body = exchange.body
        began = self.now()
        caller: Granted | None = None
        admitted: Admitted | None = None
        chosen: Chosen | None = None
        asked = ""
        try:
            caller = self._identify(exchange, began)
            tenant = caller.tenant if caller is not None else ANONYMOUS
            request = wanted(body) if endpoint.task is not _TENSOR else read(endpoint, exchange, body)
            asked = request.model
            if asked not in self.dispatcher.plain:
                chosen = self.dispatcher.resolve(request, exchange, endpoint.task, self.served, tenant)
                if chosen is not None and chosen.model != asked:
                    request.model = chosen.model
                    endpoint, body = addressed(endpoint, exchange, body, chosen.model)
            known = self.served.get(request.model)
            work_tokens = expected_tokens(request, known.lengths) if known is not None and endpoint.runs else 0.0
            if caller is not None:
                most = most_tokens(request, known.lengths, tenant) if known is not None and endpoint.runs else 0
                admitted = self._let_in(caller, request, asked, most)
            served = serving(self.served, request.model, endpoint, loaded=self.snapshot is not None)
            if chosen is not None and chosen.revision:
                check_revision(served, chosen.revision)
            routes = served.routes
            ready = not routes.drops_late or served.ready
            ticket = make_ticket(exchange, tenant, work_tokens=work_tokens, began=began, routes=routes, ready=ready)
        except Refusal as refusal:
            if admitted is not None:
                self._settle(admitted, 0, began)
            self.refuse(exchange, coded(refusal, exchange.header(CODING)), request_id, caller=caller, asked=asked)
            return
        exchange.body = b""  # the only copy is kept inside the upstream request
        relay = Relay(self, served, exchange, endpoint.path, request_id, ticket=ticket, began=began)
        if chosen is not None:
            relay.chosen, relay.revision = chosen, chosen.revision
            relay.asked = asked if asked != chosen.model else ""
        relay.admitted = admitted
        if self._recorder is not None:
            relay.client = exchange.peer
        relay.streams = request.stream
        self.aim(relay, request, body, endpoint)
        self._admit(relay)
        if request.stream:  # after the request has been sent upstream: its client waits for the first event
            exchange.rest()

    def aim(self, relay: Relay, request: Wanted, body: bytes, endpoint: Endpoint) -> None:
        """Build the upstream request and the inputs of routing."""
        routes, lengths, id = relay.served.routes, relay.served.lengths, relay.request_id
        if not endpoint.runs:  # no prefill into the cache, and no tokens to account for
            request = Wanted(request.model)
        sequence = b""
        if endpoint.task is _TENSOR:
            relay.plain = True
            sequence = request.sequence
            relay.once = bool(sequence)
        short = endpoint.task is not _CHAT or not endpoint.runs  # and every replica answers the same
        if short and relay.ticket.band < BATCH and not sequence:
            relay.hedge_after_s = routes.hedge_after_s
        relay.prompt_bytes, relay.text_bytes = len(request.text) or 1, request.text_bytes
        relay.limit = request.choices * request.limit
        if routes.policy not in COUNTING or routes.sessions is not _NO_SESSIONS or sequence:
            session = sequence or session_of(relay.exchange, routes)
            if session is None and routes.sessions is _COOKIE:
                relay.session = session = random_hex(16).encode()
            relay.ask = make_ask(request, id, routes=routes, lengths=lengths, session=session, band=relay.band)
        relay.request = b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (endpoint.head, id, len(body), body)

    def refuse(
        self,
        exchange: Exchange,
        refusal: Refusal,
        request_id: bytes = b"",
        *more: http1.Header,
        caller: Granted | None = None,
        asked: str = "",
    ) -> None:
        """Answer a request that belongs to no model with an error; `caller` and `asked` as far as they are known."""
        request_id = request_id or self.id_of(exchange)
        status = TABLE[refusal.code].status
        headers = [http1.JSON, *id_headers(request_id, exchange.path), *more, *entries.limits(self, caller)]
        if refusal.code is Code.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        default_s = 1 if refusal.code is Code.NO_REPLICA else 0
        retry_after_s = refusal.retry_after_s if isinstance(refusal, DeniedRefusal) else default_s
        if retry_after_s:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        exchange.respond(status, headers, error_body(refusal, exchange.path))
        self.refused(refusal.code)
        line = entries.refused(exchange.path, request_id.decode(), status, refusal.code.value, asked)
        raw = self._log.add(line)
        if self._recorder is not None and exchange.method == b"POST":
            self._recorder.finished(entries.refused_facts(line, raw, caller, exchange.peer))

    def refused(self, code: Code) -> None:
        """Count a response that belongs to no model."""
        self._metrics.counter("requests_total", UNKNOWN, code.value).inc()

    def _identify(self, exchange: Exchange, now: float) -> Granted | None:
        """The caller, where authentication is on. Raises `Refusal`."""
        if self.access is None:
            return None
        verdict = self.access.identify(credential(exchange.header), now)
        if isinstance(verdict, Denied):
            raise DeniedRefusal(verdict)
        return verdict

    def _let_in(self, caller: Granted, request: Wanted, asked: str, tokens: int) -> Admitted:
        """Check allow-list and limits, before the response reveals anything about models. Raises `Refusal`."""
        assert self.access is not None
        verdict = self.access.admit(caller, request.model, tokens, request.stream is True, self.now(), asked=asked)
        if isinstance(verdict, Denied):
            self._metrics.counter("tenant_refusals_total", caller.tenant.name, verdict.code.value).inc()
            raise DeniedRefusal(verdict)
        return verdict

    def _settle(self, admitted: Admitted, tokens: int, now: float) -> None:
        assert self.access is not None
        self.access.settle(admitted.reservation, tokens, now)

    # --- queueing and routing

    def _admit(self, relay: Relay) -> None:
        served, now = relay.served, relay.began
        self.budget.request(now)
        if served.routes.fallback and not served.ready and fall_back(self, relay, Condition.DOWN):
            return
        if served.freed and served.waiting.full:  # first, so that no request is rejected needlessly
            self.pump(served)
        choice = self.place(relay)
        if isinstance(choice, Route) and not (served.waiting and overtakes(relay)):  # the queued ones cannot go there
            self.send(relay, choice)
            return
        refused = served.waiting.enter(relay, relay.ticket, now)
        if refused is not None:
            fall_back_or_reject(self, refused.item, Refusal(refused.code), refused.retry_after_s)
        stays = (refused is None or refused.item is not relay) and relay.link is None and relay.ticket.last > now
        if stays and choice.why is Why.FULL:
            preempt_lower(self, relay)

    def place(self, relay: Relay) -> Route | Wait | Shed:
        """Choose a replica, after preempting batch work there if needed."""
        choice = self.choose(relay)
        if isinstance(choice, Wait) and choice.why is Why.BEST_FULL:
            choice = hold(self, relay, choice)
        if relay.served.running[BATCH] and relay.ticket.band < BATCH:
            return preempt_batch(self, relay, choice)
        return choice

    def choose(self, relay: Relay) -> Route | Wait | Shed:
        """Choose a replica."""
        served, ask = relay.served, relay.ask
        if ask is not None and ask.stays:  # looked up now: its session may have moved while it was queued
            served.homes.look(served.links)
            ask.home = served.homes.find(ask.key)
        split = served.split
        if split is None or relay.revision:
            return among(self, relay, relay.tried)
        return choose_by_arm(self, relay, split)

    def send(self, relay: Relay, route: Route) -> None:
        """Start an attempt."""
        served, now = relay.served, self.now()
        links = served.links  # a snapshot applied meanwhile replaces the list
        link = links[route.at]
        relay.run_on(link)  # written at once; no response is processed before the rest of this is done
        relay.waited(now)
        if self._recorder is not None:
            relay.candidates = entries.candidates(links, route)  # loads as the choice saw them
            relay.report_age_s = now - link.heard_at
            relay.hit = served.source(link, relay.ask, route.hit_tokens)
        self._turn += 1
        link.begin_attempt(relay, self._turn)
        served.running[relay.ticket.band] += 1
        served.waiting.served(relay.ticket)
        relay.route = route
        relay.since = now
        relay.mark = link.breaker.begin(now)
        if relay.ask is not None:
            relay.charge = served.pricing.sent(link.meter, relay.ask, route.hit_tokens, relay.streams, now)
            if relay.ask.stays:
                served.homes.settle(relay.ask.key, link.id)
        if served.split is not None:
            sent(self, relay, link, served.split)
        if relay.hedge_after_s:
            self._call_later(relay, relay.hedge_after_s, begin_hedge)
        elif relay.streams and relay.ticket.last < inf and not relay.exchange.started:
            self._call_later(relay, relay.ticket.last - now, out_of_time)

    def _call_later(self, relay: Relay, seconds: float, call: Callable[["Gateway", Relay], None]) -> None:
        if relay.timer is not None:
            relay.timer.cancel()
        relay.timer = self._later(seconds, call, self, relay)

    def hedged(self, relay: Relay, *, won: bool, reason: str = HEDGED, outcome: Outcome = Outcome.NEUTRAL) -> None:
        """Drop one of its two attempts: the first if the hedge `won`, else the hedge."""
        end_hedge(self, relay, won, reason, outcome)

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
        kind waits for one particular replica, which does not block the rest.
        """
        waiting, left = served.waiting, LOOK_MAX
        for relay in waiting:
            ask, tried, revision, ticket = relay.ask, relay.tried, relay.revision, relay.ticket
            kind = (revision, tried, ask.key if ask is not None and ask.stays else 0, kind_of(relay))
            held = stuck.get(kind)
            if held is not None:
                left -= held
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
                stuck[kind] = held  # others may be able to use replicas that this one cannot
                continue
            if isinstance(choice, Shed) and served.doubt_lost(tried):
                return True  # look at it again: a replica that it tried may be dead
            waiting.leave(relay)
            if isinstance(choice, Route):
                self.send(relay, choice)
            else:
                problem = relay.problem or Refusal(Code.REPLICA_LOST, choice.why)
                fall_back_or_reject(self, relay, problem, choice.retry_after_s, Condition.DOWN)
            return True
        return False

    def attempt_failed(self, relay: Relay, reason: str, problem: Refusal) -> None:
        """An attempt failed before anything was sent to the client, or a stream broke and can be resumed."""
        link, served, now = relay.link, relay.served, self.now()
        assert link is not None
        outcome = outcome_of(Code(reason)) if reason in CODES else Outcome.FAILED
        link.broke_off(reason, now)  # before its next load report: new requests rely on it
        if relay.side is not None:
            report(self, relay, reason if reason in CODES else problem.code.value, outcome, now)
        if relay.hedge is not None:  # the hedge takes over from the failed attempt
            self.hedged(relay, won=True, reason=reason, outcome=outcome)
            return
        renewed = reason in RESTARTING and not any(each.outcome in RESTARTING for each in relay.attempts)
        relay.attempts += (Attempt(link.id, relay.why, reason, now - relay.since),)
        self.end_attempt(relay, outcome, now)
        begun, failed = relay.exchange.started, (link.id, link.generation)
        if begun or not renewed:  # the replaced engine may get it once more; a second crash is no coincidence
            relay.tried = (*relay.tried, failed) if relay.stuck or not begun else (failed,)
        if reason == "connect" or reason in GOING:  # other replicas may be gone too: each would cost an attempt
            self.look()
        if not self._may_go_on(relay):
            relay.refuse(problem, served.waiting.retry_after_s(now))
            return
        choice = self.place(relay)
        spends = relay.refused and reason not in GOING and reason not in RESTARTING  # those get no load from a retry
        if spends and not isinstance(choice, Shed) and not self.budget.allow(now):
            choice = _OVER_BUDGET if reason == Code.REQUEST_FAILED and not begun else Wait(Why.FULL)
        if isinstance(choice, Shed) and not begun and not served.doubt_lost(relay.tried):
            relay.retries -= 1
            trouble = Condition.SATURATED if problem.code is Code.OVERLOADED else Condition.DOWN
            fall_back_or_reject(self, relay, problem, choice.retry_after_s, trouble)
            return
        (served.account.resumed(reason) if begun else served.account.retried(reason)).inc()
        if isinstance(choice, Route):
            self.send(relay, choice)
        elif self.served.get(served.routes.name) is not served:  # nothing would serve that queue
            relay.refuse(Refusal(Code.MODEL_NOT_FOUND, f"The model `{served.routes.name}` was removed.", "model"))
        else:
            relay.problem = problem
            if begun:  # a replica may come back unchanged: its engine is restarted within seconds
                relay.tried = ()
            served.waiting.enter_again(relay, relay.ticket, now)

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

    def _may_go_on(self, relay: Relay) -> bool:
        """Count another attempt, which may be queued; False if the limit is reached."""
        ticket, now = relay.ticket, self.now()
        if relay.exchange.started:
            if relay.resumes >= RESUMES_MAX or relay.stuck >= STUCK_MAX:
                return False
            relay.resumes += 1
            relay.stuck += not relay.refused
        else:
            if relay.once or relay.retries >= self._retries_max or now >= ticket.last:
                return False
            relay.retries += 1
        relay.extend_wait(now + (PATIENCE_S if ticket.band == BATCH else relay.served.routes.queue_timeout_s))
        return True

    def over(self, relay: Relay, code: str, status: int, now: float) -> None:
        """A request has ended: release its slot to the next one."""
        if relay.timer is not None:
            relay.timer.cancel()
            relay.timer = None
            if relay.hedge is not None:
                self.hedged(relay, won=False)
        served, link = relay.served, relay.link
        served.stay_s += now - relay.began
        estimate = served.lengths.tokens(relay.prompt_bytes)
        spent = estimate_usage(relay, code, now) or used(relay.reported, relay.begun, relay.events, estimate)
        work = spent.prompt + spent.completion
        if code == OK:
            if relay.plain and relay.reported is None:
                spent = Used(served.lengths.tokens(relay.text_bytes), 0, 0, estimated=True)
            work = work or (estimate if relay.plain else 0)  # without tokens, fair sharing goes by size
            self._learn(relay, link, now, estimate)
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
            self._settle(relay.admitted, spent.prompt + spent.completion, now)
        end = entries.End(relay, code, status, spent, now)
        line = self._log.add(entries.line(relay, end))
        if self._recorder is not None:
            self._recorder.finished(entries.facts(relay, end, line))
        if served.waiting:
            self.pump(served)

    def _learn(self, relay: Relay, link: Link | None, now: float, estimate: int) -> None:
        """Learn from the measured lengths and times."""
        charge = relay.charge
        prompt_tokens, output_tokens, cached_tokens = relay.usage
        if relay.plain and not prompt_tokens:
            prompt_tokens = estimate
        if not prompt_tokens:
            return
        relay.served.lengths.learn(relay.prompt_bytes, prompt_tokens, output_tokens)
        learn_answer(relay, output_tokens, now)
        if charge is None or link is None or relay.resumes or relay.preempted:
            return
        if relay.served.routes.task is not _CHAT:  # the answer is complete once the prompt has been processed
            charge.first_token(now, link.load)
        charge.done(now, link.load, prompt_tokens, cached_tokens, output_tokens)
        if charge.first_at is not None and output_tokens >= DECODE_TOKENS_MIN and link.pace.wants(now):
            pace_s = (now - charge.first_at) / (output_tokens - 1)
            link.pace.learn((charge.running + link.load) / 2, link.places, pace_s, now)

    def close(self) -> None:
        """The process is exiting: every request without its whole answer ends with an error."""
        for served in self.served.values():
            links = (*served.links, *served.leaving)
            attempts = [relay for link in links for relay in link.attempts if not isinstance(relay, Hedge)]
            for relay in (*served.waiting.waiting(), *attempts):
                served.waiting.leave(relay)  # as in `out_of_time`
                relay.give_up()
                relay.refuse(entries.stopped(begun=relay.exchange.started), 1)

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
