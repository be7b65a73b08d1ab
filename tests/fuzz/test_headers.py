"""Headers that clients, gateways and workers send: understood, or refused, or as if they were not there."""

from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import damaged, encoded, mutated, survives
from tests.net.rig import lone

from forebay.core.dispatch import Chosen
from forebay.core.errors import Refusal
from forebay.core.model import Condition, ModelRoutes, Policy, Sessions, Snapshot, Task
from forebay.core.tenancy import ANONYMOUS
from forebay.gateway.account import usage
from forebay.gateway.asking import Clients, make_ticket, session_of
from forebay.gateway.dispatch.dispatching import Dispatcher
from forebay.gateway.tenancy import credential
from forebay.net.exchange import Exchange
from forebay.wire.apis.request_fields import request_fields
from forebay.wire.documents import UNREADABLE
from forebay.worker.preflight import cut_body

NAMES = (
    b"x-forebay-priority", b"x-forebay-deadline-ms", b"x-forebay-session", b"x-forebay-fallback",
    b"x-forebay-budget-ms", b"x-forebay-max-cost", b"authorization", b"x-api-key", b"api-key", b"x-team", b"cookie",
)  # fmt: skip
VALUES = (
    b"interactive", b"batch", b"0", b"1", b"100", b"999999999", b"9999999999", b"0.5", b"1.000000001", b"1e9", b"nan",
    b"inf", b"-1", b"+1", b" 1", b"1_0", b"\xd9\xa1", b"\xb2", b"allow", b"deny", b"Bearer x", b"", b"red",
    b"a=b; forebay-session=x; c", b"forebay-session=",
)  # fmt: skip
values = st.sampled_from(VALUES) | mutated(VALUES) | st.binary(max_size=40)
headers = st.dictionaries(st.sampled_from(NAMES), values, max_size=5)


def exchange(fields: dict[bytes, bytes]) -> Exchange:
    """A request with these headers."""
    return lone(b"POST", b"/v1/chat/completions", fields)


COOKIES = ModelRoutes("m", Task.CHAT, Policy.CPR, "r", 8, 10.0, sessions=Sessions.COOKIE)


@given(headers)
def test_any_headers_make_a_ticket_or_a_refusal(fields: dict[bytes, bytes]) -> None:
    request = exchange(fields)
    ticket = survives(
        lambda _: make_ticket(request, ANONYMOUS, work_tokens=1.0, began=100.0, routes=COOKIES), b"", Refusal
    )
    if ticket is not None:
        assert ticket.band >= ANONYMOUS.band_max
        assert 100.0 <= ticket.deadline <= 150.0
    assert credential(request.header) in (*fields.values(), None)
    session = session_of(request, COOKIES)
    assert session is None or any(session in value for value in fields.values())


HOPS = (b"10.0.0.2, 198.51.100.1:80", b"[2001:db8::1%eth0]:443", b"::ffff:10.0.0.1,", b"unknown", b"1.2.3.4.5", b"[")


@given(st.sampled_from(HOPS) | mutated(HOPS) | st.binary(max_size=60))
def test_any_list_of_hops_leads_to_an_address(value: bytes) -> None:
    request: Any = SimpleNamespace(peer="10.0.0.1", headers=(), header={b"x-forwarded-for": value}.get)
    client = Clients(("10.0.0.0/8",)).of(request)
    assert client == "10.0.0.1" or str(ip_address(client)) == client


MODELS = [
    {"name": name, "task": "chat", "policy": "p2c", "revision": "r", "queue_max": 8, "queue_timeout_s": 1, **more}
    for name, more in (
        ("a", {"fallback": [{"model": "b"}, {"model": "c", "when": ["down"]}], "price_per_mtok": 3}),
        ("b", {"price_per_mtok": 1}),
        ("c", {"task": "embed", "fallback_default": False}),
    )
]
RULES = [
    {"name": "auto", "then": "b", "when": {"header": "x-team", "header_prefix": "r", "budget_ms_below": 50}},
    {"name": "auto", "then": "a", "revision": "r", "when": {"within_max_cost": True, "tenant": "t"}},
    {"name": "auto", "then": "b", "when": {"prompt_tokens_min": 1, "prompt_tokens_max": 9, "budget_ms_above": 5}},
]
SNAPSHOTS = [
    {"version": 3, "models": MODELS, "dispatch": {"aliases": {"x": "a", "y": "auto"}, "rules": RULES}},
    {"version": 0},
]


@given(damaged(SNAPSHOTS, ["a", "b", "auto", "x", "down", MODELS[0]]), headers, st.sampled_from(Condition))
def test_any_snapshot_and_headers_choose_a_model_of_the_snapshot(
    document: object, fields: dict[bytes, bytes], trouble: Condition
) -> None:
    snapshot = survives(lambda data: msgspec.json.decode(data, type=Snapshot), encoded(document), *UNREADABLE)
    if snapshot is None:
        return
    dispatcher, request = Dispatcher(), exchange(fields)
    dispatcher.take_over(snapshot)
    known = {model.name for model in snapshot.models}
    for name in sorted({"a", "x", "y", "auto", "a@r", "@", "nobody", *dispatcher.names}):
        asked = request_fields(encoded({"model": name, "messages": []}))
        for task in Task:
            chosen = survives(
                lambda _, asked=asked, task=task: dispatcher.resolve(asked, request, task, {}), b"", Refusal
            )
            chosen = chosen or Chosen(name, "")
            dispatcher.fall_back(chosen, request, {}, trouble)
            if chosen.why:
                assert chosen.model in known


@given(values | mutated([b"7,3,2", b"7,3,"], VALUES))
def test_any_usage_is_counts_that_never_go_down(value: bytes) -> None:
    prompt, completion, cached = usage(value)
    assert all(0 <= count < 10**12 for count in (prompt, completion, cached or 0))


SEAMS = (b"chatcmpl-1,7,3", b"chatcmpl-1,7,3,2", b"x,0,0")


@given(mutated(SEAMS, VALUES), mutated([b'{"model":"m"}abc', "{}é𝄞".encode()]))
def test_any_seam_cuts_a_body_in_two_or_is_refused(header: bytes, body: bytes) -> None:
    found = survives(lambda data: cut_body(header, data), body, Refusal)
    if found is not None and found[1] is not None:
        sent, seam = found
        assert sent + seam.text.encode() == body
