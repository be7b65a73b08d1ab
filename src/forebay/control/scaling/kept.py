"""What is remembered of the scaling of one model, and stored: what people have set, decisions, starts, the memory."""

from collections import deque
from typing import Final

import msgspec

from forebay.control.scaling.starts import Taken
from forebay.core.scaling.memory import Memory
from forebay.store.documents import NONE, Changed
from forebay.wire.documents import UNREADABLE

TOLD_MAX: Final = 200
"""Decisions that are remembered."""
STORED_MAX: Final = 20
"""Changes that outlive control."""
CHANGES_MAX: Final = 100
"""Changes that wait for a store that is down."""


class Told(msgspec.Struct, frozen=True):
    """A decision, which was the same from `at` to `until`, seconds since the epoch."""

    at: float
    until: float
    before: int
    """Replicas that were wanted."""
    wanted: int
    reason: str
    """A `core.scaling.values.Reason`, or `set`."""
    why: str
    figures: dict[str, float]
    done: bool = True
    """False: it was only told, in shadow mode."""

    def same(self, other: "Told") -> bool:
        """Whether the other one says the same again; a change stays as it was."""
        mine, its = (self.before, self.wanted, self.reason, self.done), (other.before, other.wanted, other.reason)
        return self.before == self.wanted and mine == (*its, other.done)


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What people have set; None: what the cluster file says. `at`: seconds since the epoch."""

    replicas: int | None = None
    """So many, whatever the load."""
    min: int | None = None
    max: int | None = None
    by: str = ""
    at: float = 0.0
    why: str = ""

    @property
    def empty(self) -> bool:
        """Nothing is set."""
        return self.replicas is None and self.min is None and self.max is None


class Document(msgspec.Struct, frozen=True):
    """The content of a row."""

    wanted: int | None = None
    asked: int | None = None
    setting: Setting = Setting()
    starts: dict[str, tuple[float, ...]] = {}
    told: tuple[Told, ...] = ()
    memory: msgspec.Raw = msgspec.Raw(b"null")


class Scaled:
    """One model."""

    __slots__ = ("asked", "changed", "kept_at", "memory", "model", "setting", "starts", "told", "version", "wanted")

    def __init__(self, model: str) -> None:
        self.model = model
        self.wanted: int | None = None
        """None: nothing was decided yet."""
        self.asked: int | None = None
        """What would be wanted without `limits`; None: the same."""
        self.setting = Setting()
        self.memory = Memory()
        self.starts: Taken = {}
        self.told: deque[Told] = deque(maxlen=TOLD_MAX)
        self.changed: deque[Changed] = deque(maxlen=CHANGES_MAX)
        """What is to be written into the history."""
        self.version = NONE
        self.kept_at = float("-inf")
        """When it was stored last, on the loop's clock."""

    @property
    def subject(self) -> str:
        """What its events are about."""
        return f"model/{self.model}"

    def text(self) -> str:
        """What is stored of it."""
        told = tuple(each for each in self.told if each.wanted != each.before)[-STORED_MAX:]
        memory = msgspec.Raw(msgspec.json.encode(self.memory))
        return msgspec.json.encode(
            Document(self.wanted, self.asked, self.setting, self.starts, told, memory)
        ).decode()

    def take(self, text: str) -> None:
        """Go on from what was stored. What another version of Forebay has left is forgotten as far as it must be."""
        try:
            document = msgspec.json.decode(text, type=Document)
        except UNREADABLE:
            return
        self.wanted, self.asked = document.wanted, document.asked
        self.setting, self.starts = document.setting, document.starts
        self.told.extend(document.told)
        try:
            self.memory = msgspec.json.decode(document.memory, type=Memory)
        except UNREADABLE:
            self.memory = Memory()

    def forget(self, written: tuple[Changed, ...]) -> None:
        """These changes are in the history."""
        left = [each for each in self.changed if each not in written]
        self.changed.clear()
        self.changed.extend(left)

    def tell(self, told: Told) -> bool:
        """Remember a decision; False if it says the same as the last one."""
        if self.told and self.told[-1].same(told):
            self.told[-1] = msgspec.structs.replace(
                self.told[-1], until=told.until, why=told.why, figures=told.figures
            )
            return False
        self.told.append(told)
        return True
