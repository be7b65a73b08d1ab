"""Roles of the admin API: the role that every operation needs, and the caller behind a key."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from forebay.core.errors import Code
from forebay.core.registry.approval import Role
from forebay.core.tenancy.keys import Denied, Directory, KeyRecord, Tenant, authorise

OPEN: Final = frozenset({"livez", "readyz", "openapi"})
"""Operations without authentication: for load balancers, and for clients before they have a key."""
ANYWHERE: Final = frozenset(
    {
        *("livez", "openapi", "metrics", "status", "events", "history"),
        *("decisions", "usage", "auditTail", "verifyAudit"),
        *("revisions", "revisionsOfModel", "revision", "addRevision", "resubmit", "setAlias", "sign", "verify"),
        *("lacking", "upload", "approve", "reject", "collect"),
    }
)
"""Operations that followers serve too: registry and history are those of the store, and records of requests lie on
the disk that all controls share."""
LEAST: Final[Mapping[str, Role]] = {
    "metrics": Role.VIEWER,
    "status": Role.VIEWER,
    "events": Role.VIEWER,
    "history": Role.VIEWER,
    "sla": Role.VIEWER,
    "decisions": Role.VIEWER,
    "usage": Role.VIEWER,
    "rollouts": Role.VIEWER,
    "rollout": Role.VIEWER,
    "scaling": Role.VIEWER,
    "scalingOfModel": Role.VIEWER,
    "nodes": Role.VIEWER,
    "revisions": Role.VIEWER,
    "revisionsOfModel": Role.VIEWER,
    "revision": Role.VIEWER,
    "keys": Role.VIEWER,
    "reload": Role.OPERATOR,
    "apply": Role.OPERATOR,
    "deploy": Role.OPERATOR,
    "pause": Role.OPERATOR,
    "resume": Role.OPERATOR,
    "promote": Role.OPERATOR,
    "abort": Role.OPERATOR,
    "setScaling": Role.OPERATOR,
    "drain": Role.OPERATOR,
    "undrain": Role.OPERATOR,
    "addRevision": Role.OPERATOR,
    "lacking": Role.OPERATOR,
    "upload": Role.OPERATOR,
    "resubmit": Role.OPERATOR,
    "setAlias": Role.OPERATOR,
    "sign": Role.OPERATOR,
    "verify": Role.OPERATOR,
    "verifyAudit": Role.OPERATOR,
    "approve": Role.ADMIN,
    "reject": Role.ADMIN,
    "collect": Role.ADMIN,
    "auditTail": Role.ADMIN,
    "createKey": Role.ADMIN,
    "revokeKey": Role.ADMIN,
    "rotateKey": Role.ADMIN,
}
"""The role that an operation needs, by its id in the API's document."""
OPERATED: Final = (
    *("models", "aliases", "routes", "limits", "worker_port_first", "control.replica_lease_s"),
    *("gateway.processes", "gateway.retries_max", "gateway.replica_timeout_s", "gateway.drain_grace_s"),
    "gateway.limits",
)
"""Settings that an operator may change: what is served, and how. All others need an admin, also those added later:
who may do what, what has to be proved, what is recorded, and `nodes`, whose launchers are commands, which would let
an operator run anything, past approvals and signatures."""
REGISTERED: Final = "registry:"
HOLDER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
"""Name of the holder of an admin key, as recorded in the history."""
_NO_KEY: Final = Denied(
    Code.UNAUTHORIZED, "Send `Authorization: Bearer KEY`; `forebay keys create --admin ROLE` makes a key."
)


class Caller(NamedTuple):
    """A caller and its role."""

    name: str
    role: Role


class Admins:
    """The keys of the admin API by id. Made as a whole from a document; never changed."""

    __slots__ = ("_directory", "_roles")

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        own = tuple(records)
        self._roles = {record.id: role_of(record.role) for record in own}
        self._directory = Directory([Tenant(record.tenant) for record in own], own, admins=True)

    def admit(self, presented: bytes | None, now: float) -> Caller | Denied:
        """The caller behind a key. `presented` may begin with `Bearer `; `now` is seconds since the epoch."""
        if not presented:
            return _NO_KEY
        verdict = authorise(self._directory, presented, now)
        if isinstance(verdict, Denied):
            return verdict
        role = self._roles[verdict.key_id]
        if role is None:
            return Denied(Code.UNAUTHORIZED, "The role of this key is unknown to this version of Forebay.")
        return Caller(verdict.tenant.name, role)


def role_of(name: str) -> Role | None:
    """The role of that name."""
    return next((role for role in Role if role.name.lower() == name), None)


def refusal(operation: str, caller: Caller) -> str | None:
    """Why the caller may not do that; None: it may. Raises KeyError for an operation that is not in the table."""
    return _lacking(operation, LEAST[operation], caller)


def changes_refusal(changed: Sequence[str], sources: Iterable[str], strict: bool, caller: Caller) -> str | None:
    """Why the caller may not apply changes of the settings with these paths; None: it may.

    `sources`: new sources of models. `strict`: approvals or signatures are required, and sources outside the registry
    would bypass them.
    """
    guarded = [path for path in changed if not any(f"{path}.".startswith(f"{one}.") for one in OPERATED)]
    if guarded:
        return _lacking(f"a change of {', '.join(guarded)}", Role.ADMIN, caller)
    past = [source for source in sources if not source.startswith(REGISTERED)] if strict else []
    if past:
        return _lacking(f"the source {past[0]}, which has not been approved,", Role.ADMIN, caller)
    return None


def _lacking(what: str, least: Role, caller: Caller) -> str | None:
    if caller.role >= least:
        return None
    return f"{what} needs the role {least.name.lower()}, and `{caller.name}` is {caller.role.name.lower()}"
