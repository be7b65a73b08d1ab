"""The event log: what happened, who did it and why. Each event carries the digest of the previous one.

`verify` detects a changed or removed event, unless all later ones were rewritten, too.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec
from sqlalchemy import Connection, insert, select, update

from forebay.store.schema import EVENTS, HEAD

FIRST: Final = "0" * 64
"""The previous digest of the first event."""
TEXT_CHARS_MAX: Final = 4096
PAGE: Final = 1000


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event. `subject`: what it happened to, such as `model/chat`; `at` is wall time."""

    number: int
    at: float
    actor: str
    kind: str
    subject: str
    why: str
    document: str
    """JSON: the data of this kind of event."""
    previous: str
    digest: str
    cluster: str = ""
    """The cluster in which it happened; empty for what all clusters share, and before schema version 0004."""


def append(
    connection: Connection,
    *,
    at: float,
    actor: str,
    kind: str,
    subject: str,
    why: str = "",
    document: object = None,
    cluster: str = "",
) -> Event:
    """Append an event in the transaction of the connection, with which it is committed."""
    number, previous = connection.execute(select(HEAD.c.number, HEAD.c.digest).with_for_update()).one()
    body = msgspec.json.encode({} if document is None else document).decode()
    bare = Event(number + 1, at, actor, kind, subject, why[:TEXT_CHARS_MAX], body, previous, "", cluster)
    event = msgspec.structs.replace(bare, digest=_digest(bare))
    connection.execute(insert(EVENTS).values(msgspec.structs.asdict(event)))
    connection.execute(update(HEAD).values(number=event.number, digest=event.digest))
    return event


def since(
    connection: Connection, number: int = 0, *, subject: str | None = None, cluster: str | None = None
) -> Iterator[Event]:
    """All events after that number, oldest first; optionally of a subject and everything below it (`a/b` in `a`).

    With `cluster`, events of other clusters that use the same store are omitted.
    """
    asked = select(EVENTS).order_by(EVENTS.c.number).limit(PAGE)
    if subject is not None:
        asked = asked.where(
            (EVENTS.c.subject == subject) | EVENTS.c.subject.startswith(f"{subject}/", autoescape=True)
        )
    if cluster is not None:
        asked = asked.where(EVENTS.c.cluster.in_((cluster, "")))
    while rows := connection.execute(asked.where(EVENTS.c.number > number)).all():
        for row in rows:
            yield Event(*row)
        number = rows[-1].number


def verify(connection: Connection) -> str | None:
    """What is wrong with the log, naming the first bad event; None: nothing."""
    number, previous = 0, FIRST
    for event in since(connection):
        if event.number != number + 1:
            return f"event {number + 1} is missing"
        if event.previous != previous:
            return f"event {event.number} does not follow event {number} as it now is"
        if event.digest != _digest(event):
            return f"event {event.number} was changed: its content has another digest"
        number, previous = event.number, event.digest
    head = connection.execute(select(HEAD.c.number, HEAD.c.digest)).one()
    if tuple(head) != (number, previous):
        return f"the last event is {number}, but {head.number} were written"
    return None


def _digest(event: Event) -> str:
    fields = list(msgspec.structs.astuple(event))
    del fields[Event.__struct_fields__.index("digest")]
    if not event.cluster:
        fields.pop()  # as written before events had clusters
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()
