"""Another model's name in the body: whatever JSON it is, the rest stays what it was."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.net.rig import lone

from forebay.core.errors import Code, Refusal
from forebay.core.model import Dispatch, ModelRoutes, Policy, Rule, Snapshot, Task, When
from forebay.core.tenancy import Tenant
from forebay.gateway.account import Account
from forebay.gateway.dispatch.dispatching import Dispatcher, renamed
from forebay.gateway.fleet import Served
from forebay.obs.metrics import Metrics
from forebay.wire.apis.request_fields import request_fields


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a"}', b'{"model":"new"}'),
        (b' \n{ "model" :\t"a" , "n" : [ 1 , 2 ] } ', b'{"model":"new","n":[ 1 , 2 ]}'),
        (b'{"x":{"model":"a"},"model":"a","":[{"model":0}]}', b'{"x":{"model":"a"},"model":"new","":[{"model":0}]}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"a"}', b'{"x":"\\"model\\":\\"a\\"","model":"new"}'),
        (b'{"mod\\u0065l":"a","\\u006dodel":"b"}', b'{"model":"new"}'),
        (b'{"model":"a","x":1,"model":"b","x":2}', b'{"model":"new","x":2}'),
        (b'{"model":"\\u00e9\\ud83d\\ude00","x":"\\u00e9"}', b'{"model":"new","x":"\\u00e9"}'),
        ('{"model":"é","ключ":"é","":0}'.encode(), '{"model":"new","ключ":"é","":0}'.encode()),
        (b'{"model":"a","x":1.50e+1,"y":%d}' % 10**30, b'{"model":"new","x":1.50e+1,"y":%d}' % 10**30),
        (b'{"x":true,"model":"a","y":null}', b'{"x":true,"model":"new","y":null}'),
    ],
)  # fmt: skip
def test_dispatch_rewrites_only_the_model_name_in_the_body(body: bytes, expected: bytes) -> None:
    assert renamed(body, "new") == expected
    assert request_fields(expected).model == "new"


def test_body_with_invalid_keys_is_rejected() -> None:
    body = b'{"model":"a","\xff":1}'
    assert request_fields(body).model == "a"
    with pytest.raises(Refusal) as caught:
        renamed(body, "new")
    assert caught.value.code is Code.INVALID_JSON


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("model"), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.text(max_size=5))
def test_body_with_other_fields_is_parsed_as_before(
    fields: dict[str, Any], ascii_only: bool, indent: int | None, name: str
) -> None:
    whole = {**fields, "model": name}
    try:
        body = json.dumps(whole, ensure_ascii=ascii_only, indent=indent).encode()
        request_fields(body)
    except (UnicodeEncodeError, Refusal):  # a lone surrogate, or a field of a wrong type: refused in any case
        return
    after = json.loads(renamed(body, "new"))
    assert after == {**json.loads(body), "model": "new"}
    assert list(after) == list(whole)


MODELS = tuple(
    ModelRoutes(name, Task.CHAT, Policy.CPR, "r-1", 8, 1.0, price_per_mtok=price)
    for name, price in (("big", 3.0), ("small", 0.5))
)


def test_rules_use_the_learned_prompt_length_of_the_model() -> None:
    dispatcher = Dispatcher()
    rules = (Rule("auto", "small", when=When(prompt_tokens_max=500)), Rule("auto", "big"))
    dispatcher.take_over(Snapshot(1, MODELS, Dispatch({}, rules)))
    served = Served(MODELS[1], Account(Metrics(), "small"))
    request = request_fields(msgspec.json.encode({"model": "auto", "prompt": "word " * 1000}))
    for learned, goes_to in ((False, "big"), (True, "small")):
        if learned:
            for _ in range(50):
                served.lengths.learn(10_000, 500, 10)
        chosen = dispatcher.resolve(request, lone(b"POST", b"/"), Task.CHAT, {"small": served})
        assert chosen is not None
        assert chosen.model == goes_to


def asked(name: str, rule: When, prompt: str = "x", tenant: str = "t", **headers: bytes) -> str | None:
    """Which model a request goes to by a rule for `auto` to `small`, before one to `big`; None: as it is called."""
    dispatcher = Dispatcher()
    rules = (Rule("auto", "small", when=rule), Rule("auto", "big"))
    dispatcher.take_over(Snapshot(1, MODELS, Dispatch({"fast": "small"}, rules)))
    fields = {key.replace("_", "-").encode(): value for key, value in headers.items()}
    exchange = lone(b"POST", b"/", fields)
    body = msgspec.json.encode({"model": name, "prompt": prompt})
    chosen = dispatcher.resolve(request_fields(body), exchange, Task.CHAT, {}, Tenant(tenant))
    return chosen.model if chosen is not None else None


@pytest.mark.parametrize(
    ("rule", "fits", "fails"),
    [
        (When(prompt_tokens_min=1000), {"prompt": "word " * 2000}, {"prompt": "word"}),
        (When(header="x-tier", header_value="gold"), {"x_tier": b"gold"}, {"x_tier": b"silver"}),
        (When(budget_ms_below=500), {"x_forebay_budget_ms": b"499.5"}, {"x_forebay_budget_ms": b"500"}),
        (When(within_max_cost=True), {"x_forebay_max_cost": b"0.5"}, {"x_forebay_max_cost": b"0.4"}),
        (When(tenant="bob"), {"tenant": "bob"}, {"tenant": "eve"}),
    ],
)
def test_rules_match_on_properties_of_the_request(rule: When, fits: dict[str, Any], fails: dict[str, Any]) -> None:
    assert asked("auto", rule, **fits) == "small"
    assert asked("auto", rule, **fails) == "big"


def test_plain_names_skip_rules_and_unknown_names_are_rejected() -> None:
    assert asked("nobody", When()) is None
    assert asked("fast", When()) == "small"
    for name, code in (("auto@r-1", Code.MODEL_NOT_FOUND), ("nobody@r-1", Code.MODEL_NOT_FOUND)):
        with pytest.raises(Refusal) as caught:
            asked(name, When())
        assert caught.value.code is code


@pytest.mark.parametrize("value", [b"", b"soon", b"-1", b"1e3", b"nan", b"inf", b"1_000"])
@pytest.mark.parametrize("header", ["x_forebay_budget_ms", "x_forebay_max_cost"])
def test_non_numeric_budget_is_rejected_with_its_header_name(header: str, value: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        asked("auto", When(), **{header: value})
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.param == header.replace("_", "-")
