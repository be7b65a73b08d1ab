"""What admission and routing need to know of a request: its priority and deadlines, its length, its session.

`prepare` adds the request as replicas get it.
"""

import math
import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Final
from zlib import crc32

from forebay.core.admission import Band, Ticket
from forebay.core.errors import Code, Refusal
from forebay.core.model import ModelRoutes, Policy, Sessions, Task
from forebay.core.prefix.blocks import BLOCK_BYTES, blocks
from forebay.core.routing import BATCH, INTERACTIVE, RoutingRequest
from forebay.core.routing.speed import Lengths
from forebay.core.tenancy import Tenant, contains_key
from forebay.net.replica_protocol import DEADLINE
from forebay.net.server import Exchange
from forebay.obs.clock import random_hex
from forebay.wire.apis.request_fields import RequestFields

if TYPE_CHECKING:
    from forebay.gateway.dispatch.endpoints import Endpoint
    from forebay.gateway.requests.relay import Relay

Address = IPv4Address | IPv6Address
FORWARDED_FOR: Final = b"x-forwarded-for"
HOPS_MAX: Final = 16
"""How many proxies in a row are looked through."""
COUNTING: Final = frozenset({Policy.ROUND_ROBIN, Policy.LEAST_REQUESTS, Policy.P2C})
"""Policies that ignore the prompt."""
FALLBACK: Final = b"x-forebay-fallback"
"""`allow` or `deny`: whether a fallback model may serve the request."""
DIGITS_MAX: Final = 9
FOUR_BYTES_MAX: Final = 0xFFFF_FFFF
REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
DEADLINE_LINE: Final = b"\r\n%b: " % DEADLINE
SESSION: Final = b"x-forebay-session"
"""Header whose value keeps requests together, for models with sessions or the policy `consistent_hash`."""
COOKIE: Final = re.compile(rb"(?:^|;)\s*forebay-session=([\x21-\x3a\x3c-\x7e]{1,128})\s*(?:;|$)")
SET_COOKIE: Final = b"forebay-session=%b; Path=/; HttpOnly; SameSite=Lax"
PRIORITY: Final = b"x-forebay-priority"
WORDS: Final = (b"allow", b"deny")
BANDS: Final = {band.name.lower().encode(): band for band in Band}
BATCH_PATIENCE: Final = 5
"""Batch work waits this many times as long: ageing promotes it after two minutes."""
_BATCH: Final = Band.BATCH  # looked up once: access to enum members is slow
_CHAT: Final = Task.CHAT
_TENSOR: Final = Task.TENSOR
_OFF: Final = Sessions.OFF
_COOKIE: Final = Sessions.COOKIE


class Ids:
    """Request ids of one gateway process."""

    def __init__(self, instance: bytes) -> None:
        self._start = b"req-%b" % instance
        self._count = 0

    def of(self, exchange: Exchange) -> bytes:
        """The id that came with a request, else a new one. Ids are in every log: one with an API key in it is not
        used."""
        given = exchange.header(b"x-request-id")
        if given and REQUEST_ID.fullmatch(given) and not contains_key(given):
            return given
        count = self._count
        self._count += 1
        digits = count.to_bytes(4 if count <= FOUR_BYTES_MAX else 8, "big").hex()  # takes a quarter of the time of %x
        return b"%b%b" % (self._start, digits.encode())


class Clients:
    """Finds the address of a request's client. `proxies`: networks of proxies whose `x-forwarded-for` is believed."""

    def __init__(self, proxies: Sequence[str]) -> None:
        self._proxies = [ip_network(proxy, strict=False) for proxy in proxies]

    def of(self, exchange: Exchange) -> str:
        """The peer; behind trusted proxies the last address in `x-forwarded-for` that is not one of theirs."""
        client = exchange.peer
        if not self._proxies or not self._is_proxy(address_of(client)):
            return client
        lines = [value for name, value in exchange.headers if name == FORWARDED_FOR]  # some proxies add one each
        hops = (b",".join(lines) or exchange.header(FORWARDED_FOR) or b"").decode("latin-1").rsplit(",", HOPS_MAX)
        for hop in reversed(hops):
            address = address_of(hop)
            if address is None:
                break
            client = str(address)
            if not self._is_proxy(address):
                break
        return client

    def _is_proxy(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._proxies)


def address_of(text: str) -> Address | None:
    """An IP address that may have a port; an IPv4 address in IPv6 form is returned as IPv4. None: it is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address if isinstance(address, IPv4Address) else address.ipv4_mapped or address


def expected_tokens(request: RequestFields, lengths: Lengths) -> float:
    """Expected tokens of prompt and completion together."""
    return lengths.tokens(len(request.text) or 1) + _answer_tokens(request, lengths)


def most_tokens(request: RequestFields, lengths: Lengths, tenant: Tenant) -> int:
    """Tokens to reserve: the prompt, plus the longest completion that the request allows, else about the longest that
    its tenant got recently, capped by the tenant's limits: only a limit set by the client itself may exceed those."""
    prompt = lengths.tokens(request.text_bytes)
    if request.limit:
        return prompt + request.choices * request.limit
    most = prompt + request.choices * int(lengths.longest_tokens(tenant.name) + 0.5)
    limits = tenant.limits
    per_min, per_day = limits.tokens_per_min, limits.tokens_per_day
    if per_min and per_min < most:  # not `min` of three: compiled, that costs ten times as much
        most = per_min
    if per_day and per_day < most:
        most = per_day
    return most if most > prompt else prompt


def _answer_tokens(request: RequestFields, lengths: Lengths) -> float:
    usual = lengths.output_tokens
    return min(usual, float(request.limit)) if request.limit else usual


def make_ticket(
    exchange: Exchange, tenant: Tenant, *, work_tokens: float, began: float, routes: ModelRoutes, ready: bool = True
) -> Ticket:
    """Priority, deadlines and expected work of a request; `ready`: a replica accepts requests. Raises `Refusal` for
    malformed headers."""
    asked = exchange.header(PRIORITY)
    if asked is not None and asked not in BANDS:
        allowed = ", ".join(name.decode() for name in BANDS)
        raise Refusal(Code.INVALID_REQUEST, f"'{PRIORITY.decode()}': allowed are {allowed}.", PRIORITY.decode())
    if routes.fallback and (given := exchange.header(FALLBACK)) is not None and given.strip().lower() not in WORDS:
        raise Refusal(Code.INVALID_REQUEST, f"'{FALLBACK.decode()}': allowed are allow, deny.", FALLBACK.decode())
    band = tenant.band if asked is None else tenant.band_of(BANDS[asked])
    patience_s, due_s, last_s = routes.queue_timeout_s, math.inf, math.inf
    given = exchange.header(DEADLINE)
    if band is _BATCH:
        patience_s *= BATCH_PATIENCE
    elif given is None and routes.ttft_budget_s:
        due_s = routes.ttft_budget_s
        if routes.drops_late and ready:
            last_s = due_s
    if given is not None:
        if not given.isdigit() or not 0 < len(given) <= DIGITS_MAX:
            text = f"'{DEADLINE.decode()}': expected an integer in milliseconds, at most {DIGITS_MAX} digits."
            raise Refusal(Code.INVALID_REQUEST, text, DEADLINE.decode())
        last_s = int(given) / 1000
    patience_s = min(patience_s, last_s)
    return Ticket(band, tenant.name, work_tokens, began + patience_s, began + due_s, last=began + last_s)


def routing_of(
    request: RequestFields,
    request_id: bytes,
    *,
    routes: ModelRoutes,
    lengths: Lengths,
    session: bytes | None = None,
    band: Band = Band.DEFAULT,
) -> RoutingRequest:
    """The routing inputs of a request. Lengths are estimates: only the engine has the tokenizer."""
    prompt = request.text
    chat = routes.task is _CHAT
    return RoutingRequest(
        crc32(request_id),
        lengths.tokens(len(prompt) or 1),
        _answer_tokens(request, lengths) if chat else 0.0,
        blocks(prompt, request.model) if chat else (),
        lengths.tokens(BLOCK_BYTES),
        key=1 + crc32(session) if session else 0,
        stays=bool(session) and (routes.sessions is not _OFF or session == request.sequence),
        weights=BATCH if band is _BATCH else INTERACTIVE,
        ttft_budget_s=routes.ttft_budget_s,
    )


def prepare(relay: "Relay", request: RequestFields, body: bytes, endpoint: "Endpoint") -> None:
    """Build the upstream request and the inputs of routing."""
    routes, lengths, id = relay.served.routes, relay.served.lengths, relay.request_id
    if not endpoint.runs:  # no prefill into the cache, and no tokens to account for
        relay.slotless, request = True, RequestFields(request.model)
    sequence = b""
    if endpoint.task is _TENSOR:
        relay.plain = True
        sequence = request.sequence
        relay.once = bool(sequence)
        relay.mid_sequence = relay.once and not request.begins
    short = endpoint.task is not _CHAT or not endpoint.runs  # and every replica answers the same
    if short and relay.ticket.band < _BATCH and not sequence:
        relay.hedge_after_s = routes.hedge_after_s
    relay.prompt_bytes, relay.text_bytes = len(request.text) or 1, request.text_bytes
    relay.choices, relay.limit = request.choices, request.choices * request.limit
    if routes.policy not in COUNTING or routes.sessions is not _OFF or sequence:
        session = sequence or session_of(relay.exchange, routes)
        if session is None and routes.sessions is _COOKIE:
            relay.session = session = random_hex(16).encode()
        relay.routing = routing_of(request, id, routes=routes, lengths=lengths, session=session, band=relay.band)
    deadline = None if endpoint.task is _CHAT else relay.exchange.header(DEADLINE)
    line = DEADLINE_LINE + deadline if deadline is not None else b""
    relay.request = b"%b%b%b\r\ncontent-length: %d\r\n\r\n%b" % (endpoint.head, id, line, len(body), body)


def with_time_left(request: bytes, left_s: float) -> bytes:
    """An upstream request with what is left of its deadline: the replica counts it from the request's arrival."""
    before, line, rest = request.partition(DEADLINE_LINE)
    return b"%b%b%d%b" % (before, line, max(1, round(left_s * 1000)), rest[rest.index(b"\r") :]) if line else request


def session_of(exchange: Exchange, routes: ModelRoutes) -> bytes | None:
    """The session key that keeps requests together; None: no session."""
    session = exchange.header(SESSION)
    if not session and routes.sessions is _COOKIE:
        found = COOKIE.search(exchange.header(b"cookie") or b"")
        return found[1] if found else None
    return session
