"""What is told of a request, in the head of its answer and in the books, out of what its relay knows."""

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from forebay.core.admission import Band
from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.routing import Route, Score, Why
from forebay.core.tenancy import without_keys
from forebay.gateway.asking import SET_COOKIE
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.facts import NOTHING, Facts, Used
from forebay.gateway.records.lines import Line
from forebay.gateway.records.recorder import Recorder
from forebay.net.server import Exchange
from forebay.obs.clock import wall_s
from forebay.wire.http1 import Header
from forebay.wire.records import CANDIDATES_MAX, NO_CANDIDATES, Decision, packed

if TYPE_CHECKING:
    from forebay.core.tenancy import Granted
    from forebay.gateway.fleet import Link
    from forebay.gateway.gateway import Gateway
    from forebay.gateway.relay import Relay
    from forebay.gateway.tenancy import Admitted

REASONS: Final = {why: why.encode() for why in Why}
PATH_CHARS_MAX: Final = 256
ASKED_CHARS_MAX: Final = 128
_STOPPED: Final = "The gateway is being stopped, and the time that it gives to answers is over"
BANDS: Final = {band: band.name.lower() for band in Band}


def head_lines(relay: "Relay") -> bytes:
    """What the head of its answer says of who gave it, and why. As bytes at once: it is said of every request."""
    link, route, chosen = relay.link, relay.route, relay.chosen
    assert link is not None
    assert route is not None
    return b"x-request-id: %b\r\nx-forebay-queue-ms: %d\r\nx-forebay-route: %b%b\r\n%b%b%b%b" % (
        relay.request_id,
        ms(relay.queued_s),
        REASONS[route.why],
        relay.side.note.encode() if relay.side is not None else b"",
        link.head_lines,
        b"set-cookie: %b\r\n" % (SET_COOKIE % relay.session) if relay.session else b"",
        b"x-forebay-dispatch: %b\r\n" % chosen.why.encode() if chosen is not None else b"",
        limit_lines(relay.gateway, relay.admitted),
    )


def refusal_headers(relay: "Relay", now: float) -> list[Header]:
    """What the head of an error says of a request that no replica answers."""
    waits = relay.link is None or relay not in relay.link.attempts
    queued_s = relay.queued_s + (now - (relay.free_at or relay.began) if waits else 0.0)
    model = relay.served.routes.name.encode()
    headers = [(b"x-forebay-queue-ms", b"%d" % ms(queued_s)), (b"x-forebay-model", model)]
    return headers + limits(relay.gateway, relay.admitted)


def limits(gateway: "Gateway", whose: "Granted | Admitted | None") -> list[Header]:
    """What `limit_lines` says, for the head of an error."""
    lines = limit_lines(gateway, whose).split(b"\r\n")[:-1]
    return [(name, value) for name, _, value in [line.partition(b": ") for line in lines]]


def limit_lines(gateway: "Gateway", whose: "Granted | Admitted | None") -> bytes:
    """What a tenant has left of its limits; nothing where nobody is asked for a key."""
    if whose is None or gateway.doorman is None:
        return b""
    return gateway.doorman.limit_lines(whose.tenant, gateway.now())


class End:
    """How a request has ended. `now` is the loop's time."""

    __slots__ = ("code", "id", "now", "spent", "status", "ts")

    def __init__(self, relay: "Relay", code: str, status: int, spent: Used, now: float) -> None:
        self.id = relay.request_id.decode("ascii")
        self.code = code
        self.status = status
        self.spent = spent
        self.now = now
        self.ts = wall_s()


def facts(relay: "Relay", end: End, line: bytes) -> Facts:
    """What is written down of it; `line` is that of the access log, as it is written."""
    link, routes, spent = relay.link, relay.served.routes, end.spent
    rows, others = relay.candidates or (NO_CANDIDATES, 0)
    decision = Decision(
        end.ts,
        end.id,
        routes.name,
        relay.ticket.tenant,
        end.status,
        end.code,
        end.now - relay.began,
        routes.policy,
        relay.why,
        rows,
        others,
        link.id if link is not None else "",
        relay.attempts,
        relay.queued_s,
        relay.first_at - relay.began if relay.first_at else 0.0,
        spent.prompt,
        spent.completion,
        spent.cached,
        spent.estimated,
        relay.resumes,
        relay.report_age_s,
        relay.asked,
        relay.hit,
        BANDS[relay.ticket.band],
        relay.ticket.last - relay.began if relay.ticket.last < inf else 0.0,
        relay.chosen.why if relay.chosen is not None else "",
    )
    revision = link.revision if link is not None else ""
    body = relay.request.partition(b"\r\n\r\n")[2] if relay.gateway.keeps_prompts else b""
    key = relay.admitted.key_id if relay.admitted is not None else ""
    return Facts(decision, line, spent, revision=revision, key=key, client=relay.client, prompt=body)


def line(relay: "Relay", end: End) -> Line:
    """The line for the access log."""
    began, link, spent = relay.began, relay.link, end.spent
    return Line(
        "request",
        end.ts,
        end.id,
        relay.path,
        relay.served.routes.name,
        end.status,
        end.code,
        ms(end.now - began),
        relay.as_stream,
        link.id if link is not None else "",
        relay.retries,
        ms(relay.first_at - began) if relay.first_at else 0,
        ms(relay.queued_s) if relay.queued_s > 0.0 else 0,
        spent.prompt,
        spent.completion,
        spent.cached,
        relay.resumes,
        relay.asked,
    )


def refused(path: str, id: str, status: int, code: str, asked: str) -> Line:
    """The line for the access log of a request that no model has got. What it names is its client's word alone: keys
    are sent in wrong places too.
    """
    path, asked = without_keys(path)[:PATH_CHARS_MAX], without_keys(asked)[:ASKED_CHARS_MAX]
    return Line("request", wall_s(), id, path, "", status, code, 0, asked=asked)


def refused_facts(line: Line, raw: bytes, caller: "Granted | None", client: str) -> Facts:
    """What is written down of it; `raw` is the line as it is written."""
    tenant, key = (caller.tenant.name, caller.key_id) if caller is not None else ("", "")
    decision = Decision(line.ts, line.request_id, "", tenant, line.status, line.code, 0.0, asked=line.asked)
    return Facts(decision, raw, NOTHING, key=key, client=client)


class Unread:
    """The books, for what the listener answers by itself: bad heads, bodies too large or too late, too many at once.
    `id_of` names it as all else is named.
    """

    def __init__(self, id_of: Callable[[Exchange], bytes], log: AccessLog, recorder: Recorder | None) -> None:
        self._id_of = id_of
        self._log = log
        self._recorder = recorder

    def note(self, seen: Exchange, code: Code) -> bytes:
        """Write down that it was refused. Returns the id that its answer is to carry."""
        request_id = self._id_of(seen)
        line = refused(seen.path, request_id.decode(), TABLE[code].status, code.value, "")
        raw = self._log.add(line)
        if self._recorder is not None:  # whatever its method: often that is not known
            self._recorder.finished(refused_facts(line, raw, None, seen.peer))
        return request_id


def stopped(*, begun: bool) -> Refusal:
    """What who still waits for an answer, or for the rest of one that has begun, is told when the gateway ends."""
    if begun:
        text = f"{_STOPPED}; what was sent is incomplete. The request can be sent again."
        return Refusal(Code.STREAM_INTERRUPTED, text)
    return Refusal(Code.DRAINING, f"{_STOPPED}; the request can be sent again.")


def candidates(links: list["Link"], route: Route) -> tuple[Raw, int]:
    """All that a choice looked at, with what each would cost if they were scored, and how many more there were.

    Where they are not: how many times as much a request counts at each, and what the chosen one is taken to hold.
    To be asked before the request is counted where it goes. The route lets go of its terms: they would be kept twice.
    """
    terms, route.terms = route.terms, None
    rows: list[tuple[object, ...]] = []
    if terms is None:
        for at, x in enumerate(links[:CANDIDATES_MAX]):
            times, hit = x.meter.burden * x.meter.handicap, route.hit_tokens if at == route.at else 0
            row = (x.id, x.generation, x.state, x.load, x.room)
            rows.append(row if times == 1.0 and not hit else (*row, 0.0, 0.0, 0.0, 0.0, 0.0, times, 0.0, hit))
        return packed(rows), max(0, len(links) - CANDIDATES_MAX)
    others = max(0, len(terms) - CANDIDATES_MAX)
    if others:  # the best are kept; who reads them sorts them
        terms = sorted(terms, key=_rank)[:CANDIDATES_MAX]
    for s in terms:
        x = links[s.at]
        rows.append(
            (
                x.id, x.generation, x.state, s.load, x.room, s.queue_s, s.prefill_s, s.decode_s, s.price_s, s.kv_s,
                s.handicap, s.total_s, s.hit_tokens,
            )
        )  # fmt: skip
    return packed(rows), others


def _rank(score: Score) -> tuple[float, int]:
    return score.total_s, score.at


def ms(seconds: float) -> int:
    """Whole milliseconds."""
    return int(seconds * 1000 + 0.5)
