"""Response headers, access log lines and records of requests."""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from forebay.core.admission import Band
from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.routing import Route, Why
from forebay.core.tenancy import without_keys
from forebay.gateway.asking import SET_COOKIE, Clients
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
    from forebay.gateway.link import Link
    from forebay.gateway.requests.relay import Relay

REASONS: Final = {why: why.encode() for why in Why}
PATH_CHARS_MAX: Final = 256
ASKED_CHARS_MAX: Final = 128
_STOPPED: Final = "The gateway is shutting down, and its grace period is over"
BANDS: Final = {band: band.name.lower() for band in Band}


def head_lines(relay: "Relay") -> bytes:
    """Headers about the replica and the routing of a response. As bytes at once, as every response has them."""
    link, route, chosen = relay.link, relay.route, relay.chosen
    assert link is not None
    assert route is not None
    return b"x-request-id: %b\r\nx-forebay-queue-ms: %d\r\nx-forebay-route: %b%b\r\n%b%b%b%b" % (
        relay.request_id,
        ms(relay.queued_s),
        REASONS[route.why],
        relay.side.note.encode() if relay.side is not None else b"",
        link.head_lines,
        _cookie_line(relay) if relay.session else b"",
        b"x-forebay-dispatch: %b\r\n" % chosen.why.encode() if chosen is not None else b"",
        relay.admitted.limit_lines(relay.scheduler.now()) if relay.admitted is not None else b"",
    )


def _cookie_line(relay: "Relay") -> bytes:
    secure = b"; Secure" if relay.exchange.encrypted else b""  # browsers drop such a cookie of plain HTTP
    return b"set-cookie: %b%b\r\n" % (SET_COOKIE % relay.session, secure)


def refusal_headers(relay: "Relay", now: float) -> list[Header]:
    """Headers of an error that no replica gave."""
    waits = relay.link is None or relay not in relay.link.attempts
    queued_s = relay.queued_s + (now - (relay.free_at or relay.began) if waits else 0.0)
    model = relay.served.routes.name.encode()
    headers = [(b"x-forebay-queue-ms", b"%d" % ms(queued_s)), (b"x-forebay-model", model)]
    return headers + (parsed(relay.admitted.limit_lines(now)) if relay.admitted is not None else [])


def parsed(lines: bytes) -> list[Header]:
    """Header lines as pairs."""
    return [(name, value) for name, _, value in [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]]


class End:
    """How a request ended. `now` is the loop's time."""

    __slots__ = ("code", "id", "now", "spent", "status", "ts")

    def __init__(self, relay: "Relay", code: str, status: int, spent: Used, now: float) -> None:
        self.id = relay.request_id.decode("ascii")
        self.code = code
        self.status = status
        self.spent = spent
        self.now = now
        self.ts = wall_s()


def facts(relay: "Relay", end: End, line: bytes, *, prompts: bool) -> Facts:
    """The record of a request, with its body if `prompts`; `line` is its access log line, encoded."""
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
    body = relay.request.partition(b"\r\n\r\n")[2] if prompts else b""
    key = relay.admitted.key_id if relay.admitted is not None else ""
    return Facts(decision, line, spent, revision=revision, key=key, client=relay.client, prompt=body)


def line(relay: "Relay", end: End) -> Line:
    """The access log line of a request."""
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
    """The access log line of a request that belongs to no model. Path and name come from the client alone: keys are
    removed, as some are sent in the wrong place."""
    path, asked = without_keys(path)[:PATH_CHARS_MAX], without_keys(asked)[:ASKED_CHARS_MAX]
    return Line("request", wall_s(), id, path, "", status, code, 0, asked=asked)


def refused_facts(line: Line, raw: bytes, caller: "Granted | None", client: str) -> Facts:
    """The record of such a request; `raw` is its access log line, encoded."""
    tenant, key = (caller.tenant.name, caller.key_id) if caller is not None else ("", "")
    decision = Decision(line.ts, line.request_id, "", tenant, line.status, line.code, 0.0, asked=line.asked)
    return Facts(decision, raw, NOTHING, key=key, client=client)


class RequestLog:
    """Logs requests as they end: a line each in the access log, and a record for `recorder`, if there is one."""

    def __init__(self, access: AccessLog, recorder: Recorder | None = None, proxies: Sequence[str] = ()) -> None:
        self.access = access
        self.client_of = Clients(proxies).of
        self._recorder = recorder
        self.records = recorder is not None
        """Whether requests are recorded, not just logged."""

    def ended(self, relay: "Relay", end: End) -> None:
        """A request of a model has ended."""
        raw = self.access.add(line(relay, end))
        if self._recorder is not None:
            self._recorder.finished(facts(relay, end, raw, prompts=self._recorder.prompts))

    def refused(
        self,
        exchange: Exchange,
        request_id: bytes,
        code: Code,
        *,
        caller: "Granted | None" = None,
        asked: str = "",
        recorded: bool = True,
    ) -> None:
        """A request that belongs to no model got an error; it is logged, and `recorded` or not."""
        line = refused(exchange.path, request_id.decode(), TABLE[code].status, code.value, asked)
        raw = self.access.add(line)
        if self._recorder is not None and recorded:
            self._recorder.finished(refused_facts(line, raw, caller, self.client_of(exchange)))


def stopped(*, begun: bool) -> Refusal:
    """The error of a request whose response, or the rest of it, is still awaited when the gateway exits."""
    if begun:
        text = f"{_STOPPED}; the response is incomplete. Retry the request."
        return Refusal(Code.STREAM_INTERRUPTED, text)
    return Refusal(Code.DRAINING, f"{_STOPPED}; retry the request.")


def candidates(links: list["Link"], route: Route) -> tuple[Raw, int]:
    """The candidates of a choice with their scores, if it made any, and how many more there were.

    Without scores: the load factor of each, and the cached tokens assumed at the chosen one. Call this before the
    request is counted there. The route's terms are cleared, so as not to keep them twice.
    """
    terms, route.terms = route.terms, None
    rows: list[tuple[object, ...]] = []
    if terms is None:
        ats: Sequence[int] = range(len(links))
        if len(ats) > CANDIDATES_MAX:
            ats = [route.at, *(at for at in ats[:CANDIDATES_MAX] if at != route.at)][:CANDIDATES_MAX]
        for at in ats:
            x = links[at]
            times, hit = x.meter.burden * x.meter.handicap, route.hit_tokens if at == route.at else 0
            row = (x.id, x.generation, x.state, x.load, x.room)
            rows.append(row if times == 1.0 and not hit else (*row, 0.0, 0.0, 0.0, 0.0, 0.0, times, 0.0, hit))
        return packed(rows), max(0, len(links) - CANDIDATES_MAX)
    others = max(0, len(terms) - CANDIDATES_MAX)
    if others:  # keep the chosen one, which may have been drawn among many, and the best; readers sort them
        terms = sorted(terms, key=lambda score: (score.at != route.at, score.total_s, score.at))[:CANDIDATES_MAX]
    for s in terms:
        x = links[s.at]
        rows.append(
            (
                x.id, x.generation, x.state, s.load, x.room, s.queue_s, s.prefill_s, s.decode_s, s.price_s, s.kv_s,
                s.handicap, s.total_s, s.hit_tokens,
            )
        )  # fmt: skip
    return packed(rows), others


def ms(seconds: float) -> int:
    """Seconds as whole milliseconds, rounded."""
    return int(seconds * 1000 + 0.5)
