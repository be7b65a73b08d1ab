"""Requests that have waited too long, and their error responses."""

import math
from typing import TYPE_CHECKING

from forebay.core.errors import TABLE, Code, Refusal
from forebay.gateway.dispatch.fallback import fall_back_or_reject
from forebay.net.replica_protocol import DEADLINE

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler


def drop_late(scheduler: "Scheduler", served: "Served") -> None:
    """Reject all requests that have waited too long."""
    now = scheduler.now()
    for relay in served.waiting.expire(now):
        if relay.ticket.last <= now and not relay.exchange.started:
            relay.refuse(_past_deadline(relay), served.waiting.retry_after_s(now))
        else:
            fall_back_or_reject(scheduler, relay, *_too_late(served, now))


def _too_late(served: "Served", now: float) -> tuple[Refusal, int]:
    """The error, and its retry-after in seconds: while a replica starts, as long as that takes."""
    if served.ready:
        return Refusal(Code.QUEUE_TIMEOUT), served.waiting.retry_after_s(now)
    start_s = math.ceil(served.routes.start_s)
    if not start_s:
        return Refusal(Code.NO_REPLICA), served.waiting.retry_after_s(now)
    text = f"{TABLE[Code.NO_REPLICA].text} One that starts is ready after about {start_s} s."
    return Refusal(Code.NO_REPLICA, text), start_s


def out_of_time(scheduler: "Scheduler", relay: "Relay") -> None:
    """A streaming request has passed its deadline: if nothing has come, it is still queued, here or in the engine."""
    if not (relay.exchange.started or relay.exchange.finished):
        relay.give_up()
        relay.served.waiting.leave(relay)  # first: the response lets in its connection's next request, which pumps
        relay.refuse(_past_deadline(relay), relay.served.waiting.retry_after_s(scheduler.now()))


def _past_deadline(relay: "Relay") -> Refusal:
    """The error, which names the source of the deadline: a client that set none should not look for one."""
    source = "the model's SLO" if relay.exchange.header(DEADLINE) is None else DEADLINE.decode()
    time_ms = round((relay.ticket.last - relay.began) * 1000)
    return Refusal(Code.DEADLINE_EXCEEDED, f"The answer had not started within {time_ms} ms ({source}).")
