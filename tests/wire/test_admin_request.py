"""Admin API requests are parsed or rejected, and whatever is accepted conforms to the published schema."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request as asked
from forebay.wire.openai_fields import shape_of

PARSERS: dict[str, tuple[Callable[[bytes], object], Callable[[Any, str], Any]]] = {
    "deploy": (asked.deploy, asked.DEPLOY),
    "why": (asked.why, asked.COMMAND),
    "alias": (asked.alias, asked.ALIAS),
    "add": (asked.add, asked.ADD),
    "verify": (asked.verify, asked.VERIFY),
    "lacking": (asked.lacking, asked.LACKING),
    "audit_tail": (asked.audit_tail, asked.AUDIT_TAIL),
    "audit_verify": (asked.audit_verify, asked.AUDIT_VERIFY),
    "nothing": (asked.nothing, asked.NOTHING),
    "apply": (asked.apply, asked.APPLY),
}
KEYS = (
    "revision",
    "plan",
    "why",
    "unchecked",
    "source",
    "task",
    "engine",
    "settings",
    "metadata",
    "model",
    "document",
    "files",
    "lone",
    "last",
    "archived",
)
leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=6) | st.sampled_from(["chat", "canary"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
bodies = st.dictionaries(st.sampled_from([*KEYS, "dry_run", "other"]), values, max_size=5)


def tried(work: Callable[[], Any]) -> Any:
    """What comes of it, or why nothing does."""
    try:
        return work()
    except Refusal as refusal:
        return refusal


@pytest.mark.parametrize("name", PARSERS)
@given(body=bodies)
def test_any_body_is_rejected_by_name_or_conforms_to_the_schema(name: str, body: dict[str, Any]) -> None:
    parse, reader = PARSERS[name]
    found = tried(lambda: parse(msgspec.json.encode(body)))
    if isinstance(found, Refusal):
        assert found.code is Code.INVALID_REQUEST
        assert found.param
    else:
        Draft202012Validator(shape_of(reader)).validate(body)


@pytest.mark.parametrize("name", PARSERS)
@given(body=st.binary(max_size=30))
def test_non_object_body_is_rejected(name: str, body: bytes) -> None:
    found = tried(lambda: PARSERS[name][0](body))
    if isinstance(found, Refusal):
        assert found.code in (Code.INVALID_JSON, Code.INVALID_REQUEST)


@given(st.dictionaries(st.sampled_from(["subject", "last", "after"]), st.text(max_size=20), max_size=3))
def test_query_out_of_bounds_is_rejected_by_name(query: dict[str, str]) -> None:
    wanted = tried(lambda: asked.history(query))
    if isinstance(wanted, Refusal):
        assert wanted.param in query
        return
    assert 1 <= wanted.last <= asked.EVENTS_MAX
    assert wanted.after is None or wanted.after >= 0
    assert (wanted.subject or "").isprintable()


def test_omitted_fields_have_defaults() -> None:
    assert asked.deploy(b'{"revision": "r"}') == asked.DeployRequest("r", None, "", False)
    assert asked.add(b'{"source": "s"}') == asked.AddRequest("s", None, None, {}, {})
    assert asked.apply(b'{"document": "d"}') == asked.ApplyRequest("d", False)
    assert (asked.why(b""), asked.verify(b""), asked.history({})) == ("", None, asked.HistoryRequest(None, 50, None))
    assert [asked.flag({"x": word}, "x") for word in ("true", "false")] == [True, False]
    assert asked.flag({}, "x") is None
