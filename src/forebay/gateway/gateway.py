"""The request loop: read what a request wants, wait for a replica, relay, try again elsewhere, settle."""

import asyncio
from collections.abc import Callable
from math import inf
from random import Random
from typing import Final

from forebay.core.dispatch import Chosen
from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import Condition, GatewaySpec, Policy, Sessions, Snapshot, Task
from forebay.core.resilience import Outcome, RetryBudget, outcome_of
from forebay.core.routing import Chooser, Route, Shed, Wait, Why, choose
from forebay.core.routing.meter import DECODE_TOKENS_MIN
from forebay.core.tenancy import ANONYMOUS, Denied, Granted
from forebay.gateway.account import CLIENT_CLOSED, OK, Account
from forebay.gateway.admission.giving_way import PATIENCE_S, make_room, make_way
from forebay.gateway.admission.holding import LOOK_MAX, hold, overtakes
from forebay.gateway.asking import Ids, expected_tokens, make_ask, make_ticket, most_tokens, session_of
from forebay.gateway.dispatch.choosing import among
from forebay.gateway.dispatch.dispatching import Dispatcher, addressed, check_revision, read, serving
from forebay.gateway.dispatch.endpoints import Endpoint
from forebay.gateway.dispatch.stepping_in import fall_back, fall_back_all, turn_away
from forebay.gateway.fleet import BATCH, GOING, RESTARTING, Link, Served
from forebay.gateway.hedging import HEDGED, Hedge, begin_hedge, end_hedge
from forebay.gateway.pressure.late import drop_late, out_of_time
from forebay.gateway.records import told
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.facts import Used, used
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.records.unseen import learn_answer, unseen
from forebay.gateway.relay import Relay
from forebay.gateway.rollout.arms import choose_by_arm, kind_of, report, sent
from forebay.gateway.rollout.reporting import Observations
from forebay.gateway.tenancy import Admitted, DeniedRefusal, Doorman, credential
from forebay.gateway.tensor.answers import CODES
from forebay.net.server import Exchange
from forebay.obs.clock import random_hex
from forebay.obs.metrics import UNKNOWN, Metrics
from forebay.wire import http1
from forebay.wire.apis.wanted import CODING, Wanted, coded, wanted
from forebay.wire.errors import error_body, id_headers
from forebay.wire.records import Attempt

COUNTING: Final = frozenset({Policy.ROUND_ROBIN, Policy.LEAST_REQUESTS, Policy.P2C})
"""Policies that look at no prompt."""
RESUMES_MAX: Final = 16
"""How often one stream goes on elsewhere. It had its place and its client waits, so more often than it is retried."""
STUCK_MAX: Final = 3
"""How often in a row without a single event in between: such a request may be what kills the engines."""
_CHAT: Final = Task.CHAT  # looked up once: members of an enum are slow to get at
_TENSOR: Final = Task.TENSOR
_NO_SESSIONS: Final = Sessions.OFF
_COOKIE: Final = Sessions.COOKIE
_OK: Final = Outcome.OK
_FAILED: Final = Outcome.FAILED
_OVER_BUDGET: Final = Shed(Code.REQUEST_FAILED, Why.ALL_TRIED, retry_after_s=1)


class Gateway:
    """Requests of the public listener, in flight and waiting. Replicas come and go by `fleet`."""

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
        self.doorman: Doorman | None = None
        """Who asks for keys; None: everybody may use everything."""
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
        """Takes a newer snapshot over, if there is one."""

    def account(self, model: str) -> Account:
        """The account of a configured model."""
        return Account(self._metrics, model)

    # --- requests come in

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
        exchange.body = b""  # it is kept once, inside the request
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
        if request.stream:  # after the request has been sent on: its client waits for the first event
            exchange.rest()

    def aim(self, relay: Relay, request: Wanted, body: bytes, endpoint: Endpoint) -> None:
        """Make what the replicas of its model get, and what choosing one of them takes."""
        routes, lengths, id = relay.served.routes, relay.served.lengths, relay.request_id
        if not endpoint.runs:  # nothing is read into a cache, and nothing is used
            request = Wanted(request.model)
        sequence = b""
        if endpoint.task is _TENSOR:
            relay.plain = True
            sequence = request.sequence
            relay.once = bool(sequence)
        short = endpoint.task is not _CHAT or not endpoint.runs  # and the same from everyone
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
        """Answer a request that belongs to no model with an error; `caller` and `asked`: as far as they are known."""
        request_id = request_id or self.id_of(exchange)
        status = TABLE[refusal.code].status
        headers = [http1.JSON, *id_headers(request_id, exchange.path), *more, *told.limits(self, caller)]
        if refusal.code is Code.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        none = 1 if refusal.code is Code.NO_REPLICA else 0
        retry_after_s = refusal.retry_after_s if isinstance(refusal, DeniedRefusal) else none
        if retry_after_s:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        exchange.respond(status, headers, error_body(refusal, exchange.path))
        self.refused(refusal.code)
        line = told.refused(exchange.path, request_id.decode(), status, refusal.code.value, asked)
        raw = self._log.add(line)
        if self._recorder is not None and exchange.method == b"POST":
            self._recorder.finished(told.refused_facts(line, raw, caller, exchange.peer))

    def refused(self, code: Code) -> None:
        """Count an answer that belongs to no model."""
        self._metrics.counter("requests_total", UNKNOWN, code.value).inc()

    def _identify(self, exchange: Exchange, now: float) -> Granted | None:
        """Whose request it is, where that is asked. Raises `Refusal`."""
        if self.doorman is None:
            return None
        verdict = self.doorman.identify(credential(exchange.header), now)
        if isinstance(verdict, Denied):
            raise DeniedRefusal(verdict)
        return verdict

    def _let_in(self, caller: Granted, request: Wanted, asked: str, tokens: int) -> Admitted:
        """Ask the doorman, before anything is said of models. Raises `Refusal`."""
        assert self.doorman is not None
        verdict = self.doorman.admit(caller, request.model, tokens, request.stream is True, self.now(), asked=asked)
        if isinstance(verdict, Denied):
            self._metrics.counter("tenant_refusals_total", caller.tenant.name, verdict.code.value).inc()
            raise DeniedRefusal(verdict)
        return verdict

    def _settle(self, admitted: Admitted, tokens: int, now: float) -> None:
        assert self.doorman is not None
        self.doorman.settle(admitted.reservation, tokens, now)

    # --- waiting and routing

    def _admit(self, relay: Relay) -> None:
        served, now = relay.served, relay.began
        self.budget.request(now)
        if served.routes.fallback and not served.ready and fall_back(self, relay, Condition.DOWN):
            return
        if served.freed and served.waiting.full:  # sooner than somebody is turned away
            self.pump(served)
        choice = self.place(relay)
        if isinstance(choice, Route) and not (served.waiting and overtakes(relay)):  # who waits could not go there
            self.send(relay, choice)
            return
        refused = served.waiting.enter(relay, relay.ticket, now)
        if refused is not None:
            turn_away(self, refused.item, Refusal(refused.code), refused.retry_after_s)
        stays = (refused is None or refused.item is not relay) and relay.link is None and relay.ticket.last > now
        if stays and choice.why is Why.FULL:
            make_room(self, relay)

    def place(self, relay: Relay) -> Route | Wait | Shed:
        """Which replica gets it; batch work has made way for it there."""
        choice = self.choose(relay)
        if isinstance(choice, Wait) and choice.why is Why.BEST_FULL:
            choice = hold(self, relay, choice)
        if relay.served.running[BATCH] and relay.ticket.band < BATCH:
            return make_way(self, relay, choice)
        return choice

    def choose(self, relay: Relay) -> Route | Wait | Shed:
        """Which replica is to get it."""
        served, ask = relay.served, relay.ask
        if ask is not None and ask.stays:  # looked up now: its session may have moved while it waited
            served.homes.look(served.links)
            ask.home = served.homes.find(ask.key)
        split = served.split
        if split is None or relay.revision:
            return among(self, relay, relay.tried)
        return choose_by_arm(self, relay, split)

    def send(self, relay: Relay, route: Route) -> None:
        """Begin an attempt."""
        served, now = relay.served, self.now()
        links = served.links  # another snapshot may be taken over before we are done
        link = links[route.at]
        relay.run_on(link)  # it is written at once, and nothing comes back before all below is done
        relay.waited(now)
        if self._recorder is not None:
            relay.candidates = told.candidates(links, route)  # their loads are told as they were
            relay.report_age_s = now - link.heard_at
            relay.hit = served.source(link, relay.ask, route.hit_tokens)
        self._turn += 1
        link.take(relay, self._turn)
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
        """One of its two attempts is of no use any more: the first one if the hedge has `won`."""
        end_hedge(self, relay, won, reason, outcome)

    def pump(self, served: Served) -> None:
        """Send what waits, in order, as far as there is room."""
        if served.pumping:  # who is turned away below has ended, and that calls this again: too deep for a long line
            return
        served.pumping, served.freed = True, False
        stuck: dict[tuple[object, ...], bool] = {}
        try:
            drop_late(self, served)
            while served.waiting and self._send_next(served, stuck):
                if served.troubled:  # when the last one that is on trial has got its request, all are let through
                    stuck.clear()
        finally:
            served.pumping = False

    def _send_next(self, served: Served, stuck: dict[tuple[object, ...], bool]) -> bool:
        """Send, or turn away, the first of those who wait that need not wait any more; False if there is none.

        `stuck` are the kinds that have to wait: within one round replicas only get fuller. True: behind the first of
        theirs, which waits for one replica.
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
            if band is not None and band < ticket.band:  # it has risen by its age, for good
                relay.ticket = ticket.risen(band)
            choice = self.place(relay)
            if isinstance(choice, Wait):
                held = choice.why is Why.BEST_FULL or served.split is not None
                if not (tried or revision or served.troubled or held or choice.why is Why.SESSION_FULL):
                    return False  # then nobody else can go either
                stuck[kind] = held  # others may have nowhere else to go than who is shut
                continue
            if isinstance(choice, Shed) and served.doubt_lost(tried):
                return True  # it is looked at again: where it was may be nobody any more
            waiting.leave(relay)
            if isinstance(choice, Route):
                self.send(relay, choice)
            else:
                problem = relay.problem or Refusal(Code.REPLICA_LOST, choice.why)
                turn_away(self, relay, problem, choice.retry_after_s, Condition.DOWN)
            return True
        return False

    def again(self, relay: Relay, reason: str, problem: Refusal) -> None:
        """An attempt failed before anything was sent to the client."""
        link, served, now = relay.link, relay.served, self.now()
        assert link is not None
        outcome = outcome_of(Code(reason)) if reason in CODES else Outcome.FAILED
        link.broke_off(reason, now)  # sooner than its next load report: who comes now waits for what follows it
        if relay.side is not None:
            report(self, relay, reason if reason in CODES else problem.code.value, outcome, now)
        if relay.hedge is not None:  # it takes the place of the one that failed
            self.hedged(relay, won=True, reason=reason, outcome=outcome)
            return
        renewed = reason in RESTARTING and not any(each.outcome in RESTARTING for each in relay.attempts)
        relay.attempts += (Attempt(link.id, relay.why, reason, now - relay.since),)
        self.take_back(relay, outcome, now)
        begun, failed = relay.exchange.started, (link.id, link.generation)
        if begun or not renewed:  # its next engine may have it, once: a second one that dies of it is no accident
            relay.tried = (*relay.tried, failed) if relay.stuck or not begun else (failed,)
        if reason == "connect" or reason in GOING:  # others may be gone with it: each would cost an attempt
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
            turn_away(self, relay, problem, choice.retry_after_s, trouble)
            return
        (served.account.resumed(reason) if begun else served.account.retried(reason)).inc()
        if isinstance(choice, Route):
            self.send(relay, choice)
        elif self.served.get(served.routes.name) is not served:  # nobody looks after who waits there
            relay.refuse(Refusal(Code.MODEL_NOT_FOUND, f"The model `{served.routes.name}` was removed.", "model"))
        else:
            relay.problem = problem
            if begun:  # a replica may come back as it is: its engine is replaced within seconds
                relay.tried = ()
            served.waiting.enter_again(relay, relay.ticket, now)

    def take_back(self, relay: Relay, outcome: Outcome, now: float, tokens: int = 0) -> bool:
        """Take an attempt off all accounts; `tokens` is what it has used. False if there was none."""
        link, served = relay.link, relay.served
        if link is None or not link.give_back(relay):
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
        """Note another attempt, which may be waited for, unless it is one too many."""
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
        relay.wait_on(now + (PATIENCE_S if ticket.band == BATCH else relay.served.routes.queue_timeout_s))
        return True

    def over(self, relay: Relay, code: str, status: int, now: float) -> None:
        """A request has ended: free its place for the next one."""
        if relay.timer is not None:
            relay.timer.cancel()
            relay.timer = None
            if relay.hedge is not None:
                self.hedged(relay, won=False)
        served, link = relay.served, relay.link
        served.stay_s += now - relay.began
        estimate = served.lengths.tokens(relay.prompt_bytes)
        spent = unseen(relay, code, now) or used(relay.told, relay.begun, relay.events, estimate)
        work = spent.prompt + spent.completion
        if code == OK:
            if relay.plain and relay.told is None:
                spent = Used(served.lengths.tokens(relay.text_bytes), 0, 0, estimated=True)
            work = work or (estimate if relay.plain else 0)  # what has no tokens is shared out by its size
            self._learn(relay, link, now, estimate)
            outcome = _OK
        else:
            outcome = Outcome.NEUTRAL if code == CLIENT_CLOSED else outcome_of(Code(code))
        if relay.side is not None:
            report(self, relay, code, outcome, now)
        if self.take_back(relay, outcome, now, work):
            assert link is not None
            relay.attempts += (Attempt(link.id, relay.why, code, now - relay.since),)
            served.waiting.rate.count(now)
        else:  # it waits, or is about to; a stream that was broken has used something all the same
            relay.waited(now)
            served.waiting.leave(relay)
            served.waiting.charge(relay.ticket, work)
        served.account.spent(spent)
        if relay.admitted is not None:
            self._settle(relay.admitted, spent.prompt + spent.completion, now)
        end = told.End(relay, code, status, spent, now)
        line = self._log.add(told.line(relay, end))
        if self._recorder is not None:
            self._recorder.finished(told.facts(relay, end, line))
        if served.waiting:
            self.pump(served)

    def _learn(self, relay: Relay, link: Link | None, now: float, estimate: int) -> None:
        """See how long it really took."""
        charge = relay.charge
        prompt_tokens, output_tokens, cached_tokens = relay.usage
        if relay.plain and not prompt_tokens:
            prompt_tokens = estimate
        if not prompt_tokens:
            return
        relay.served.lengths.learn(relay.prompt_bytes, prompt_tokens, output_tokens)
        learn_answer(relay, output_tokens, now)
        if charge is None or link is None or relay.resumes or relay.gave_way:
            return
        if relay.served.routes.task is not _CHAT:  # the answer is there when the prompt has been read
            charge.first_token(now, link.load)
        charge.done(now, link.load, prompt_tokens, cached_tokens, output_tokens)
        if charge.first_at is not None and output_tokens >= DECODE_TOKENS_MIN and link.pace.wants(now):
            pace_s = (now - charge.first_at) / (output_tokens - 1)
            link.pace.learn((charge.running + link.load) / 2, link.places, pace_s, now)

    def close(self) -> None:
        """The process ends: whoever still waits for an answer, or for its rest, is told so."""
        for served in self.served.values():
            links = (*served.links, *served.leaving)
            attempts = [relay for link in links for relay in link.attempts if not isinstance(relay, Hedge)]
            for relay in (*served.waiting.waiting(), *attempts):
                served.waiting.leave(relay)  # as in `out_of_time`
                relay.give_up()
                relay.refuse(told.stopped(begun=relay.exchange.started), 1)

    def expire(self) -> None:
        """Refuse who has waited too long, and send who can go."""
        now = self.now()
        for served in self.served.values():
            served.look_again(now)
            if not served.waiting:
                continue
            drop_late(self, served)
            served.waiting.rise(now)
            if served.routes.fallback:
                fall_back_all(self, served, now)
            self.pump(served)
