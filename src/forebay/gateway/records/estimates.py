"""Token usage of requests whose client left before any of the response arrived, and what that estimate learns from.

No engine reports what it did for those, so it is estimated from the time that it had. Otherwise a client that always
disconnects just before a complete response would get work done that counts against no limit.
"""

from typing import TYPE_CHECKING, Final

from forebay.core.errors import CLIENT_CLOSED, Code
from forebay.core.model import Task
from forebay.core.routing.meter import DECODE_TOKENS_MIN
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.records.facts import Used

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay

LEFT: Final = frozenset({CLIENT_CLOSED, Code.DEADLINE_EXCEEDED.value})
"""Outcomes of requests that an engine may have worked on without a response."""
_CHAT: Final = Task.CHAT


def estimate_usage(relay: "Relay", code: str, now: float) -> Used | None:
    """An estimate; None if more is known, if no replica has the request, or if its prompt cannot have been processed
    yet."""
    link, lengths = relay.link, relay.served.lengths
    if code not in LEFT or relay.first_at or relay.reported is not None or link is None or relay not in link.attempts:
        return None
    endpoint, answering_s = ENDPOINTS.get(relay.path.encode()), _answering_s(relay, now)
    runs = endpoint.runs if endpoint is not None else relay.exchange.method == b"POST"  # paths of model servers
    prompt = relay.begun[0] or lengths.tokens(relay.text_bytes if relay.plain else relay.prompt_bytes)
    if not runs or relay.refused or (answering_s < 0.0 and not relay.begun[0]):
        return None
    completion = 0
    if relay.served.routes.task is _CHAT and not relay.streams:  # a stream delivers its tokens as they come
        most = relay.limit or relay.choices * lengths.longest_tokens(relay.ticket.tenant)
        completion = int(min(relay.parallel * max(0.0, answering_s) / lengths.pace_s, most))
    return Used(prompt, completion, relay.begun[2] or 0, estimated=True)


def learn_answer(relay: "Relay", output_tokens: int, steps: int, now: float) -> None:
    """Learn from a complete response of so many tokens, generated in `steps`: the time per step, and the length of a
    choice if the client set no limit."""
    lengths = relay.served.lengths
    if relay.served.routes.task is not _CHAT or relay.link is None:
        return
    if not relay.limit:
        lengths.learn_longest(relay.ticket.tenant, -(-output_tokens // relay.choices))
    if relay.resumes or relay.preempted:  # it was queued in between
        return
    answering_s = now - relay.first_at if relay.first_at else _answering_s(relay, now)
    if steps >= DECODE_TOKENS_MIN and answering_s > 0.0:
        lengths.learn_pace(answering_s / steps)


def _answering_s(relay: "Relay", now: float) -> float:
    """How long its replica must have been decoding; negative: it is still at this prompt, or at those ahead of it."""
    link, charge, served = relay.link, relay.charge, relay.served
    assert link is not None
    if charge is None:
        prompt_tokens = served.lengths.tokens(relay.prompt_bytes)
    else:
        prompt_tokens = charge.ahead_tokens + charge.tokens
    return now - relay.since - prompt_tokens / served.pricing.speed(link.meter)
