"""What the groups of the admin API's operations share: how one is described, and what every one may answer."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from forebay.core.errors import Code
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import ANYWHERE, LEAST, OPEN
from forebay.wire import admin_request as asked
from forebay.wire.openai_fields import Reader
from forebay.wire.openapi import answers
from forebay.wire.openapi.document import Operation, Parameter

Said = Mapping[int, Mapping[str, type | None]]

NO_BODIES: Final[Mapping[str, None]] = {}
PLACES: Final = {
    "model": "Name of a model.",
    "revision": "A revision, by id or alias.",
    "alias": "An alias, such as `champion`.",
    "id": "Id of a rollout.",
    "node": "Name of a node.",
    "key": "Id of a key: the part after `fb-`.",
    "sha256": "SHA-256 of the content, in lower-case hex.",
}
BODY: Final = (Code.INVALID_JSON, Code.INVALID_REQUEST)
STORE: Final = (Code.STORE_UNAVAILABLE, Code.OVERLOADED, Code.DRAINING)
MISSING: Final = (Code.NOT_FOUND, Code.CONFLICT, *STORE)
CHANGE: Final = (*BODY, *STORE, Code.NOT_FOUND, Code.CONFLICT)


class Answers(NamedTuple):
    """The types of the documents that control answers with."""

    status: type
    events: type
    reloaded: type
    history: type
    rollouts: type
    rollout: type
    revisions: type
    revision: type
    verified: type
    collected: type
    scalings: type
    scaling: type
    sla: type
    nodes: type
    node: type
    keys: type
    key: type
    new_key: type
    decisions: type
    usage: type
    audit_tail: type
    audit_verified: type
    lacking: type
    part: type


def operation(
    path: str,
    method: str,
    id: str,
    text: str,
    said: Said,
    *,
    body: tuple[Reader, str] | None = None,
    query: tuple[Parameter, ...] = (),
    bodies: Mapping[str, type | None] = NO_BODIES,
    codes: tuple[Code, ...] = (),
) -> Operation:
    """`body`: its reader and name, or else `bodies` by media type. Who may follows from the table of roles."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    places = tuple(
        Parameter(name, "path", PLACES[name], {"type": "string", "minLength": 1, "maxLength": asked.NAME_CHARS_MAX})
        for name in names
    )
    if id not in OPEN:
        least = LEAST[id]
        text = text if least is Role.VIEWER else f"{text} Needs the role {least.name.lower()}."
        codes = (*codes, Code.UNAUTHORIZED, Code.ROLE_NOT_ALLOWED)
    if id not in ANYWHERE:
        codes = (*codes, Code.NOT_LEADER)
    reader, name = body or (None, "")
    return Operation(
        path,
        method,
        id,
        text,
        said,
        answers.Error,
        body=reader,
        body_name=name,
        body_needed=reader in _NEEDED or reader is None,
        parameters=(*places, *query),
        codes=codes,
        bodies=bodies,
        secured=id not in OPEN,
    )


_NEEDED: Final = (
    asked.DEPLOY,
    asked.ALIAS,
    asked.ADD,
    asked.LACKING,
    asked.SIGN,
    asked.CREATE_KEY,
    asked.APPLY,
)
"""Bodies with something that must be said."""
