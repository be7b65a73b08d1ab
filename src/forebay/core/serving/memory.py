"""Which models stay in memory under a budget: the least recently used gives way, busy and pinned ones never do."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forebay.core.serving.errors import Kind, Refused

GIB = 2**30


class _Held:
    __slots__ = ("busy", "pinned", "size_bytes")

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self.pinned = pinned
        self.busy = 0


class Standing(NamedTuple):
    """What one model holds. `busy` counts its requests."""

    name: str
    size_bytes: int
    busy: int
    pinned: bool


class MemoryBudget:
    """The account of what models hold. `budget_bytes` 0: no budget, everything is admitted.

    It says what will be once victims are gone: end them before the newcomer is loaded. Names are the caller's.
    """

    __slots__ = ("_held", "budget_bytes", "used_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def standing(self) -> list[Standing]:
        """All that are held, the least recently used first."""
        return [Standing(name, held.size_bytes, held.busy, held.pinned) for name, held in self._held.items()]

    def admit(self, name: str, size_bytes: int, *, pinned: bool = False) -> tuple[str, ...] | None:
        """Count a model that is about to be loaded, and say whom it displaces: these are no longer counted.

        `size_bytes` is what is known or guessed; correct it with `resize`. A model that is held already is counted
        anew. None, and nothing has changed: there is no room before some that are busy fall idle. Raises Refused
        (UNAVAILABLE) with the arithmetic, and changes nothing, if there will not be room then either.
        """
        if not self.has_room(name, size_bytes):
            return None
        before = self._held.get(name)
        beside_bytes = self.used_bytes - (before.size_bytes if before is not None else 0)
        victims = self._victims(name, beside_bytes + size_bytes - self.budget_bytes)
        for victim in victims:
            self.remove(victim)
        held = _Held(size_bytes, pinned)
        held.busy = before.busy if before is not None else 0
        self.remove(name)
        self._held[name] = held
        self.used_bytes += size_bytes
        return victims

    def has_room(self, name: str, size_bytes: int) -> bool:
        """Whether a model could hold so much now, if all that may go went. Raises Refused if it never could."""
        if not self.budget_bytes:
            return True
        left_bytes = self.budget_bytes - self._pinned_bytes(name)
        if size_bytes > left_bytes:
            raise Refused(Kind.UNAVAILABLE, self._arithmetic(size_bytes, max(0, left_bytes)))
        staying_bytes = sum(
            held.size_bytes for other, held in self._held.items() if other != name and (held.pinned or held.busy)
        )
        return staying_bytes + size_bytes <= self.budget_bytes

    def relief(self, name: str, size_bytes: int, ripe: Sequence[str]) -> tuple[str, ...]:
        """Who of `ripe` would have to fall idle for a newcomer to find room: the first of them, none needlessly.

        Idle ones that are not ripe give way anyhow. Empty: it needs none of them, or all of them are not enough.
        """
        staying_bytes = sum(
            held.size_bytes
            for other, held in self._held.items()
            if other != name and (held.pinned or held.busy or other in ripe)
        )
        lacking_bytes = staying_bytes + size_bytes - self.budget_bytes
        sizes = {other: self._held[other].size_bytes for other in ripe if other in self._held and other != name}
        return _fewest(sizes, lacking_bytes) if sum(sizes.values()) >= lacking_bytes else ()

    def most_bytes(self, name: str) -> int:
        """What a model can hold at most: the budget without what others have pinned."""
        return max(0, self.budget_bytes - self._pinned_bytes(name))

    def _pinned_bytes(self, name: str) -> int:
        """What others hold that never give it back."""
        return sum(held.size_bytes for other, held in self._held.items() if other != name and held.pinned)

    def resize(self, name: str, size_bytes: int) -> None:
        """Correct what a model holds, as measured; then `trim`. Unknown names are ignored."""
        held = self._held.get(name)
        if held is not None:
            self.used_bytes += size_bytes - held.size_bytes
            held.size_bytes = size_bytes

    def trim(self, spared: str = "") -> tuple[str, ...]:
        """Who has to go because models hold more than the budget, as far as that helps: no longer counted.

        One is `spared`, else the one that was used last: it would only be loaded again for the next request.
        """
        if self.used_bytes <= self.budget_bytes or not self._held:
            return ()
        victims = self._victims(spared or next(reversed(self._held)), self.used_bytes - self.budget_bytes)
        for victim in victims:
            self.remove(victim)
        return victims

    def enter(self, name: str) -> None:
        """A request for the model is under way: while it is, the model stays. Unknown names are ignored."""
        held = self._held.get(name)
        if held is not None:
            held.busy += 1
            self._held.move_to_end(name)

    def leave(self, name: str) -> None:
        """The request has ended; it counts as use."""
        held = self._held.get(name)
        if held is not None:
            held.busy -= 1
            self._held.move_to_end(name)

    def remove(self, name: str) -> None:
        """The model is gone or about to go; unknown names are ignored."""
        held = self._held.pop(name, None)
        if held is not None:
            self.used_bytes -= held.size_bytes

    def _victims(self, name: str, excess_bytes: int) -> tuple[str, ...]:
        """Who goes so that so much is freed, or as much as can be, least recently used first."""
        if not self.budget_bytes:
            return ()
        sizes = {
            other: held.size_bytes
            for other, held in self._held.items()
            if other != name and not held.busy and not held.pinned
        }
        return _fewest(sizes, excess_bytes)

    def _arithmetic(self, size_bytes: int, most_bytes: int) -> str:
        need, budget = _gib(size_bytes), f"the memory budget of {_gib(self.budget_bytes)}"
        if size_bytes <= self.budget_bytes:
            return f"needs {need}, and what is pinned leaves {_gib(most_bytes)} of {budget}"
        return f"needs {need}, more than {budget}"


def _fewest(sizes: Mapping[str, int], bytes_needed: int) -> tuple[str, ...]:
    """The first that together have so many bytes (or all of them), without those that the last one makes needless."""
    chosen: list[str] = []
    found_bytes = 0
    for name, size_bytes in sizes.items():
        if found_bytes >= bytes_needed:
            break
        if size_bytes:
            chosen.append(name)
            found_bytes += size_bytes
    for name in reversed(chosen[:]):
        if found_bytes - sizes[name] >= bytes_needed:
            chosen.remove(name)
            found_bytes -= sizes[name]
    return tuple(chosen)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
