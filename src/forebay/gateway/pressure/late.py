"""Who has waited too long, and what is said to them."""

import math
from typing import TYPE_CHECKING

from forebay.core.errors import TABLE, Code, Refusal
from forebay.gateway.asking import DEADLINE
from forebay.gateway.dispatch.stepping_in import turn_away

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served
    from forebay.gateway.gateway import Gateway
    from forebay.gateway.relay import Relay


def drop_late(gateway: "Gateway", served: "Served") -> None:
    """Refuse all who have waited too long."""
    now = gateway.now()
    for relay in served.waiting.expire(now):
        if relay.ticket.last <= now and not relay.exchange.started:
            relay.refuse(_past_deadline(relay), served.waiting.retry_after_s(now))
        else:
            turn_away(gateway, relay, *_too_late(served, now))


def _too_late(served: "Served", now: float) -> tuple[Refusal, int]:
    """The answer, and after how many seconds to come back: while a replica starts, as long as that takes."""
    if served.ready:
        return Refusal(Code.QUEUE_TIMEOUT), served.waiting.retry_after_s(now)
    start_s = math.ceil(served.routes.start_s)
    if not start_s:
        return Refusal(Code.NO_REPLICA), served.waiting.retry_after_s(now)
    text = f"{TABLE[Code.NO_REPLICA].text} One that starts is ready after about {start_s} s."
    return Refusal(Code.NO_REPLICA, text), start_s


def out_of_time(gateway: "Gateway", relay: "Relay") -> None:
    """The deadline of a request for a stream is over: if nothing of it has come, it waits in its engine, too."""
    if not (relay.exchange.started or relay.exchange.finished):
        relay.give_up()
        relay.served.waiting.leave(relay)  # first: the answer lets in the next request of its connection, which pumps
        relay.refuse(_past_deadline(relay), relay.served.waiting.retry_after_s(gateway.now()))


def _past_deadline(relay: "Relay") -> Refusal:
    """The answer, which names the source of the deadline: a client that set none should not look for one."""
    source = "the model's SLO" if relay.exchange.header(DEADLINE) is None else DEADLINE.decode()
    time_ms = round((relay.ticket.last - relay.began) * 1000)
    return Refusal(Code.DEADLINE_EXCEEDED, f"The answer had not started within {time_ms} ms ({source}).")
