"""The stored state of the scaling of one model: operator settings, decisions, start times, the autoscaler's state."""

from collections import deque
from typing import Final

import msgspec

from forebay.control.scaling.starts import Taken
from forebay.core.scaling.state import AutoscalerState
from forebay.store.documents import NONE, Changed
from forebay.wire.documents import UNREADABLE

DECISIONS_MAX: Final = 200
"""How many decisions are kept."""
STORED_MAX: Final = 20
"""How many changes survive a restart of control."""
CHANGES_MAX: Final = 100
"""How many changes wait for a store that is down."""


class DecisionRecord(msgspec.Struct, frozen=True):
    """A decision that was unchanged from `at` to `until`, in seconds since the epoch."""

    at: float
    until: float
    before: int
    """The replicas wanted before."""
    wanted: int
    reason: str
    """A `core.scaling.values.Reason`, or `set`."""
    why: str
    figures: dict[str, float]
    done: bool = True
    """False: only reported, in shadow mode."""

    def same(self, other: "DecisionRecord") -> bool:
        """Whether the other decision repeats this one; decisions that change the count are never merged."""
        mine, its = (self.before, self.wanted, self.reason, self.done), (other.before, other.wanted, other.reason)
        return self.before == self.wanted and mine == (*its, other.done)


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What operators have set; None: as in the cluster file. `at`: seconds since the epoch."""

    replicas: int | None = None
    """A fixed count, whatever the load."""
    min: int | None = None
    max: int | None = None
    by: str = ""
    at: float = 0.0
    why: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing is set."""
        return self.replicas is None and self.min is None and self.max is None


class Document(msgspec.Struct, frozen=True):
    """The document of a row."""

    wanted: int | None = None
    asked: int | None = None
    setting: Setting = Setting()
    starts: dict[str, tuple[float, ...]] = {}
    decisions: tuple[DecisionRecord, ...] = msgspec.field(default=(), name="told")
    autoscaler: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="memory")
    """An `AutoscalerState`, apart: one of another version may be unreadable."""


class ScalingState:
    """The scaling state of one model."""

    __slots__ = (
        "asked",
        "autoscaler",
        "changed",
        "decisions",
        "kept_at",
        "model",
        "setting",
        "starts",
        "version",
        "wanted",
    )

    def __init__(self, model: str) -> None:
        self.model = model
        self.wanted: int | None = None
        """None: nothing was decided yet."""
        self.asked: int | None = None
        """The count wanted without `limits`; None: the same."""
        self.setting = Setting()
        self.autoscaler = AutoscalerState()
        self.starts: Taken = {}
        self.decisions: deque[DecisionRecord] = deque(maxlen=DECISIONS_MAX)
        self.changed: deque[Changed] = deque(maxlen=CHANGES_MAX)
        """Events that are still to be stored."""
        self.version = NONE
        self.kept_at = float("-inf")
        """When it was last stored, on the loop's clock."""

    @property
    def subject(self) -> str:
        """The subject of its events."""
        return f"model/{self.model}"

    def text(self) -> str:
        """The document to be stored."""
        decisions = tuple(each for each in self.decisions if each.wanted != each.before)[-STORED_MAX:]
        autoscaler = msgspec.Raw(msgspec.json.encode(self.autoscaler))
        return msgspec.json.encode(
            Document(self.wanted, self.asked, self.setting, self.starts, decisions, autoscaler)
        ).decode()

    def take(self, text: str) -> None:
        """Restore stored state. Parts written by another version of Forebay are dropped if they cannot be read."""
        try:
            document = msgspec.json.decode(text, type=Document)
        except UNREADABLE:
            return
        self.wanted, self.asked = document.wanted, document.asked
        self.setting, self.starts = document.setting, document.starts
        self.decisions.extend(document.decisions)
        try:
            self.autoscaler = msgspec.json.decode(document.autoscaler, type=AutoscalerState)
        except UNREADABLE:
            self.autoscaler = AutoscalerState()

    def forget(self, written: tuple[Changed, ...]) -> None:
        """Drop changes that have been stored."""
        left = [each for each in self.changed if each not in written]
        self.changed.clear()
        self.changed.extend(left)

    def record(self, decision: DecisionRecord) -> bool:
        """Record a decision; False if it repeats the last one."""
        if self.decisions and self.decisions[-1].same(decision):
            self.decisions[-1] = msgspec.structs.replace(
                self.decisions[-1], until=decision.until, why=decision.why, figures=decision.figures
            )
            return False
        self.decisions.append(decision)
        return True
