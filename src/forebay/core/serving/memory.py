"""Which models stay in memory under a budget: LRU eviction, except for busy and pinned models."""

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
    """The memory of one model. `busy` counts its requests in flight."""

    name: str
    size_bytes: int
    busy: int
    pinned: bool


class MemoryBudget:
    """Accounts for the memory of models. `budget_bytes` 0: no budget, everything is admitted.

    It accounts for victims as evicted already: unload them before the new model is loaded. Names are chosen by the
    caller.
    """

    __slots__ = ("_held", "budget_bytes", "used_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def standing(self) -> list[Standing]:
        """All models in memory, least recently used first."""
        return [Standing(name, held.size_bytes, held.busy, held.pinned) for name, held in self._held.items()]

    def admit(self, name: str, size_bytes: int, *, pinned: bool = False) -> tuple[str, ...] | None:
        """Account for a model about to be loaded, and return the models to evict, which no longer count.

        `size_bytes` is known or estimated; correct it with `resize`. A model already held is counted anew. Returns
        None, without effect, if there is no room until busy models become idle. Raises Refused (UNAVAILABLE) with the
        figures, without effect, if there would be no room even then.
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
        """Whether a model of this size fits now, by evicting all that may be evicted. Raises Refused if it never
        could."""
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
        """The models of `ripe` that must become idle to make room for a new one: in order, and none needlessly.

        Idle models that are not in `ripe` are evicted anyway. Empty: none is needed, or all of them are not enough.
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
        """The most memory that a model can get: the budget without what others have pinned."""
        return max(0, self.budget_bytes - self._pinned_bytes(name))

    def _pinned_bytes(self, name: str) -> int:
        """Memory pinned by others."""
        return sum(held.size_bytes for other, held in self._held.items() if other != name and held.pinned)

    def resize(self, name: str, size_bytes: int) -> None:
        """Set the measured size of a model; then call `trim`. Unknown names are ignored."""
        held = self._held.get(name)
        if held is not None:
            self.used_bytes += size_bytes - held.size_bytes
            held.size_bytes = size_bytes

    def trim(self, spared: str = "") -> tuple[str, ...]:
        """The models to evict because the budget is exceeded, as far as that helps; they no longer count.

        `spared` is exempt, by default the most recently used one, which would only be loaded again for the next
        request.
        """
        if self.used_bytes <= self.budget_bytes or not self._held:
            return ()
        victims = self._victims(spared or next(reversed(self._held)), self.used_bytes - self.budget_bytes)
        for victim in victims:
            self.remove(victim)
        return victims

    def enter(self, name: str) -> None:
        """A request for the model has begun; the model stays in memory until it ends. Unknown names are ignored."""
        held = self._held.get(name)
        if held is not None:
            held.busy += 1
            self._held.move_to_end(name)

    def leave(self, name: str) -> None:
        """The request has ended, which counts as a use."""
        held = self._held.get(name)
        if held is not None:
            held.busy -= 1
            self._held.move_to_end(name)

    def remove(self, name: str) -> None:
        """The model was unloaded or is about to be; unknown names are ignored."""
        held = self._held.pop(name, None)
        if held is not None:
            self.used_bytes -= held.size_bytes

    def _victims(self, name: str, excess_bytes: int) -> tuple[str, ...]:
        """Models to evict to free this much, or as much as possible, least recently used first."""
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
            return f"needs {need}, but pinned models leave {_gib(most_bytes)} of {budget}"
        return f"needs {need}, more than {budget}"


def _fewest(sizes: Mapping[str, int], bytes_needed: int) -> tuple[str, ...]:
    """The first models whose sizes sum to this (or all), without those that became superfluous."""
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
    """In GiB; too small budgets, whose unit was forgotten, would be shown as zero."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 100 or not size_bytes else f"{size_bytes} bytes"
