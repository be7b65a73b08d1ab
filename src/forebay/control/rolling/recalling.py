"""The deployed state as last read from the store, in a local file: for a start while the store is down.

It holds neither evidence nor model files: what runs is kept, what would have to be started waits for the store.
"""

from pathlib import Path

import msgspec

from forebay.core.deploy.counting import Counted
from forebay.core.deploy.rollout import Rollout
from forebay.core.deploy.slots import Held
from forebay.core.rollout import begin
from forebay.store.rollouts import Known, Row, RulesDocument, Target, rules_document, rules_from
from forebay.wire.documents import UNREADABLE


class KeptRow(msgspec.Struct, frozen=True):
    """A rollout."""

    rollout: Rollout
    rules: RulesDocument
    held: Held
    created_at: float
    created_by: str


class Kept(msgspec.Struct, frozen=True):
    """The content of the file."""

    targets: tuple[Target, ...]
    rollouts: tuple[KeptRow, ...]


class Recall:
    """The file. Errors only prevent a start without the store."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: Kept | None = None

    def keep(self, known: Known) -> None:
        """Write the state, unless unchanged."""
        rows = (
            KeptRow(row.rollout, rules_document(row.rules), row.held, row.created_at, row.created_by)
            for row in known.rollouts
        )
        kept = Kept(known.targets, tuple(rows))
        if kept == self._kept:
            return
        draft = self._path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(kept))
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
        else:
            self._kept = kept

    def read(self) -> Known | None:
        """The state in the file; None: there is none."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=Kept)
            rows = tuple(_row(each) for each in kept.rollouts)
        except (OSError, KeyError, *UNREADABLE):
            return None
        return Known(kept.targets, rows)


def _row(kept: KeptRow) -> Row:
    """Its version is 0, which the store never has: the store's state takes precedence."""
    rules = rules_from(kept.rules)
    counted = Counted(begin(rules))
    return Row(kept.rollout, rules, counted, kept.held, kept.created_at, kept.created_by, version=0)
