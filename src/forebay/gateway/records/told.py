"""What is written down of a finished request, out of what its relay knows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.core.routing import Route, Score
from forebay.gateway.records.accesslog import Line
from forebay.gateway.records.facts import Facts, Used
from forebay.obs.clock import wall_s
from forebay.wire.records import CANDIDATES_MAX, Candidate, Decision

if TYPE_CHECKING:
    from forebay.gateway.fleet import Link
    from forebay.gateway.relay import Relay


def facts(relay: "Relay", code: str, status: int, now: float, spent: Used) -> Facts:
    """What is written down of it."""
    link, routes = relay.link, relay.served.routes
    decision = Decision(
        wall_s(),
        relay.request_id.decode("ascii"),
        routes.name,
        relay.ticket.tenant,
        status,
        code,
        now - relay.began,
        policy=routes.policy,
        why=relay.why,
        candidates=relay.candidates[:CANDIDATES_MAX],
        others=max(0, len(relay.candidates) - CANDIDATES_MAX),
        chosen=link.id if link is not None else "",
        attempts=tuple(relay.attempts),
        queued_s=max(0.0, relay.queued_s),
        ttft_s=relay.first_at - relay.began if relay.first_at else 0.0,
        prompt_tokens=spent.prompt,
        completion_tokens=spent.completion,
        cached_tokens=spent.cached,
        estimated=spent.estimated,
        resumed=relay.resumes,
        report_age_s=relay.report_age_s,
        asked=relay.asked,
        hit=relay.hit,
    )
    revision = link.revision if link is not None else ""
    body = relay.request.partition(b"\r\n\r\n")[2] if relay.desk.keeps_prompts else b""
    key = relay.admitted.key_id if relay.admitted is not None else ""
    return Facts(decision, relay.path, revision=revision, key=key, client=relay.client, prompt=body)


def line(relay: "Relay", code: str, status: int, now: float) -> Line:
    """The line for the access log."""
    began, link = relay.began, relay.link
    return Line(
        "request",
        wall_s(),
        relay.request_id.decode("ascii"),
        relay.path,
        relay.served.routes.name,
        status,
        code,
        ms(now - began),
        relay.as_stream,
        link.id if link is not None else "",
        relay.retries,
        ms(relay.first_at - began) if relay.first_at else 0,
        ms(relay.queued_s) if relay.queued_s > 0.0 else 0,
        relay.usage[0],
        relay.usage[1],
        relay.usage[2] or 0,
        relay.resumes,
        relay.asked,
    )


def candidates(links: Sequence["Link"], route: Route) -> tuple[Candidate, ...]:
    """All that a choice looked at, with what each would cost if they were scored; the route lets go of its terms."""
    if not route.terms:
        return tuple([Candidate(x.id, x.generation, x.state, x.load, x.room) for x in links])
    terms: Sequence[Score] = route.terms
    if len(terms) > CANDIDATES_MAX:  # the best are kept; who reads them sorts them
        terms = sorted(terms, key=lambda score: (score.total_s, score.at))
    rows = []
    for s in terms:
        x = links[s.at]
        rows.append(
            Candidate(
                x.id, x.generation, x.state, s.load, x.room, s.queue_s, s.prefill_s, s.decode_s, s.price_s, s.kv_s,
                s.handicap, s.total_s, s.hit_tokens,
            )
        )  # fmt: skip
    route.terms = ()  # they would be kept twice, and a stream may last for hours
    return tuple(rows)


def ms(seconds: float) -> int:
    """Whole milliseconds."""
    return int(seconds * 1000 + 0.5)
