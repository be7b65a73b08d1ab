"""Roles of the admin API: every operation has a row; keys identify callers; tenants' keys are not accepted."""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from forebay.control.api.app import ANSWERS, HANDLERS
from forebay.core.cluster import Cluster, GatewaySettings
from forebay.core.leading.settings import ControlSettings
from forebay.core.registry import approval
from forebay.core.registry.approval import Role, Step
from forebay.core.tenancy import ENTROPY_BYTES, Denied, Directory, Tenant, authorise, mint
from forebay.core.tenancy.roles import LEAST, OPEN, OPERATED, Admins, Caller, changes_refusal, refusal, role_of
from forebay.wire.openapi import admin

KEY, RECORD = mint("ada", bytes(range(ENTROPY_BYTES)), 100.0, role="operator")
OPERATIONS = {each.id: each for each in admin.operations(ANSWERS)}
roles = st.sampled_from(list(Role))


def test_role_table_and_handlers_cover_exactly_the_api_operations() -> None:
    assert LEAST.keys() | OPEN == OPERATIONS.keys()
    assert not LEAST.keys() & OPEN
    assert HANDLERS.keys() | {"openapi"} == OPERATIONS.keys()


def test_viewers_may_only_read() -> None:
    assert {id for id, least in LEAST.items() if least is Role.VIEWER} | OPEN == {
        id for id, each in OPERATIONS.items() if each.method == "get"
    }


def test_approval_steps_need_the_roles_of_the_registry() -> None:
    names = {Step.ADD: "addRevision"}
    assert {step: LEAST[names.get(step, step.value)] for step in Step} == approval.LEAST


@pytest.mark.parametrize("operation", sorted(LEAST))
@pytest.mark.parametrize("role", list(Role))
def test_each_operation_needs_the_role_of_its_row(operation: str, role: Role) -> None:
    why_not = refusal(operation, Caller("ada", role))

    assert (why_not is None) == (role >= LEAST[operation])
    if why_not is not None:
        assert operation in why_not
        assert LEAST[operation].name.lower() in why_not


def test_operation_without_a_row_is_an_error() -> None:
    with pytest.raises(KeyError):
        refusal("unheard-of", Caller("ada", Role.ADMIN))


@given(st.text(max_size=20))
def test_role_of_finds_exactly_the_known_names(name: str) -> None:
    assert role_of(name) == {role.name.lower(): role for role in Role}.get(name)


def test_a_valid_key_identifies_its_holder_and_role() -> None:
    assert Admins([RECORD]).admit(f"Bearer {KEY}".encode(), 200.0) == Caller("ada", Role.OPERATOR)


@pytest.mark.parametrize(
    ("record", "presented", "says"),
    [
        (RECORD, None, "keys create --admin"),
        (RECORD, b"", "keys create --admin"),
        (RECORD, b"Bearer nonsense", "not valid"),
        (RECORD, f"{KEY[:-1]}{'a' if KEY[-1] != 'a' else 'b'}".encode(), "not valid"),
        (replace(RECORD, revoked=150.0), KEY.encode(), "revoked"),
        (replace(RECORD, expires=150.0), KEY.encode(), "expired"),
        (replace(RECORD, role="emperor"), KEY.encode(), "role"),
        (replace(RECORD, role=""), KEY.encode(), "not valid"),
    ],
)
def test_every_other_key_is_rejected(record: Any, presented: bytes | None, says: str) -> None:
    verdict = Admins([record]).admit(presented, 200.0)

    assert isinstance(verdict, Denied)
    assert says in verdict.text


@given(roles, st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES))
def test_admin_keys_and_tenant_keys_are_not_interchangeable(role: Role, entropy: bytes) -> None:
    own, kept = mint("team", entropy, 0.0, role=role.name.lower())
    other, theirs = mint("team", entropy, 0.0)

    assert isinstance(authorise(Directory([Tenant("team")], [kept]), own.encode(), 1.0), Denied)
    assert isinstance(Admins([theirs]).admit(other.encode(), 1.0), Denied)


def settings(section: type[BaseModel], path: str) -> set[str]:
    """The paths of a section's settings."""
    return {f"{path}{name}" for name in section.model_fields}


SETTINGS = settings(Cluster, "") | settings(GatewaySettings, "gateway.") | settings(ControlSettings, "control.")


def test_settings_that_operators_may_change_exist() -> None:
    assert set(OPERATED) <= SETTINGS


@pytest.mark.parametrize(
    "path",
    [
        *sorted(SETTINGS - set(OPERATED)),
        *("registry.approvals_min", "tenants.team.limits.streams_max", "gateway.records.audit"),
        *("nodes.local", "nodes.local.launcher"),
        *("brand_new", "gateway.brand_new", "modelsx", "gateway.limitsx.headers_max"),
    ],
)
def test_only_an_admin_changes_settings_that_are_not_an_operators(path: str) -> None:
    changed = ["models.chat.replicas", path]

    assert path in cast(str, changes_refusal(changed, (), False, Caller("bob", Role.OPERATOR)))
    assert changes_refusal(changed, (), False, Caller("ada", Role.ADMIN)) is None


def test_operator_may_change_models_and_their_serving() -> None:
    changed = [*OPERATED, "models.chat", "models.chat.engine.threads", "gateway.limits.headers_max", "aliases.small"]

    assert changes_refusal(changed, (), False, Caller("bob", Role.OPERATOR)) is None


@pytest.mark.parametrize(
    ("sources", "strict", "role", "may"),
    [
        (("./m.gguf",), False, Role.OPERATOR, True),
        (("./m.gguf",), True, Role.OPERATOR, False),
        (("./m.gguf",), True, Role.ADMIN, True),
        (("registry:chat@champion",), True, Role.OPERATOR, True),
        ((), True, Role.OPERATOR, True),
    ],
)
def test_where_approvals_are_required_an_operator_cannot_bypass_them(
    sources: tuple[str, ...], strict: bool, role: Role, may: bool
) -> None:
    assert (changes_refusal(["models.chat.source"], sources, strict, Caller("bob", role)) is None) == may
