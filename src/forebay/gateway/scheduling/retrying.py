"""What becomes of a request whose attempt failed: another replica, the queue, a fallback model, or its error."""

from typing import TYPE_CHECKING, Final

from forebay.core.admission import Band
from forebay.core.errors import Code, Refusal
from forebay.core.model import Condition
from forebay.core.routing import Route, Shed, Wait, Why
from forebay.gateway.dispatch.fallback import fall_back_or_reject
from forebay.gateway.link import GOING, RESTARTING
from forebay.gateway.scheduling.preemption import PATIENCE_S

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

RESUMES_MAX: Final = 16
"""How often a stream may be resumed on another replica: more than retries, as it had a slot and its client waits."""
STUCK_MAX: Final = 3
"""Consecutive resumes without one event in between: such a request may be what crashes the engines."""
_OVER_BUDGET: Final = Shed(Code.REQUEST_FAILED, Why.ALL_TRIED, retry_after_s=1)


def retry(scheduler: "Scheduler", relay: "Relay", reason: str, problem: Refusal, now: float) -> None:
    """Start another attempt, or queue the request for one. If that is not possible it ends with `problem`."""
    served, begun = relay.served, relay.exchange.started
    if reason == "connect" or reason in GOING:  # other replicas may be gone too: each would cost an attempt
        scheduler.reload()
    if not may_go_on(scheduler, relay):
        relay.refuse(problem, served.waiting.retry_after_s(now))
        return
    choice = scheduler.place(relay)
    spends = relay.refused and reason not in GOING and reason not in RESTARTING  # those get no load from a retry
    if spends and not isinstance(choice, Shed) and not scheduler.budget.allow(now):
        choice = _OVER_BUDGET if reason == Code.REQUEST_FAILED and not begun else Wait(Why.FULL)
    if isinstance(choice, Shed) and not begun and not served.doubt_lost(relay.tried):
        relay.retries -= 1
        trouble = Condition.SATURATED if problem.code is Code.OVERLOADED else Condition.DOWN
        fall_back_or_reject(scheduler, relay, problem, choice.retry_after_s, trouble)
        return
    (served.account.resumed(reason) if begun else served.account.retried(reason)).inc()
    if isinstance(choice, Route):
        scheduler.send(relay, choice)
    elif scheduler.served.get(served.routes.name) is not served:  # nothing would serve that queue
        relay.refuse(Refusal(Code.MODEL_NOT_FOUND, f"The model `{served.routes.name}` was removed.", "model"))
    else:
        relay.problem = problem
        if begun:  # a replica may come back unchanged: its engine is restarted within seconds
            relay.tried = ()
        served.waiting.enter_again(relay, relay.ticket, now)


def may_go_on(scheduler: "Scheduler", relay: "Relay") -> bool:
    """Count another attempt, which may be queued; False if the limit is reached."""
    ticket, now = relay.ticket, scheduler.now()
    if relay.exchange.started:
        if relay.resumes >= RESUMES_MAX or relay.stuck >= STUCK_MAX:
            return False
        relay.resumes += 1
        relay.stuck += not relay.refused
    else:
        if relay.once or relay.retries >= scheduler.retries_max or now >= ticket.last:
            return False
        relay.retries += 1
    relay.extend_wait(now + (PATIENCE_S if ticket.band == Band.BATCH else relay.served.routes.queue_timeout_s))
    return True
