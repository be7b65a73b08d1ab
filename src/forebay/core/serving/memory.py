"""Which models stay in memory under a budget: the least recently used gives way, busy and pinned ones never do."""

from collections import OrderedDict
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

    def admit(self, name: str, size_bytes: int, *, pinned: bool = False) -> tuple[str, ...]:
        """Count a model that is about to be loaded, and say whom it displaces: these are no longer counted.

        `size_bytes` is what is known or guessed; correct it with `resize`. A model that is held already is counted
        anew. Raises Refused (UNAVAILABLE) with the arithmetic, and changes nothing, if even all that may go would not
        make room.
        """
        before = self._held.get(name)
        beside_bytes = self.used_bytes - (before.size_bytes if before is not None else 0)
        victims, freed_bytes = self._victims(name, beside_bytes + size_bytes - self.budget_bytes)
        if self.budget_bytes and beside_bytes + size_bytes - freed_bytes > self.budget_bytes:
            raise Refused(Kind.UNAVAILABLE, self._arithmetic(name, size_bytes))
        for victim in victims:
            self.remove(victim)
        held = _Held(size_bytes, pinned)
        held.busy = before.busy if before is not None else 0
        self.remove(name)
        self._held[name] = held
        self.used_bytes += size_bytes
        return victims

    def resize(self, name: str, size_bytes: int) -> tuple[str, ...]:
        """Correct what a model holds, as measured. Returns who has to go for it, as far as that helps."""
        held = self._held[name]
        self.used_bytes += size_bytes - held.size_bytes
        held.size_bytes = size_bytes
        victims, _ = self._victims(name, self.used_bytes - self.budget_bytes)
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

    def _victims(self, name: str, excess_bytes: int) -> tuple[tuple[str, ...], int]:
        """Who goes so that so much is freed, least recently used first, none needlessly; and what that frees."""
        if not self.budget_bytes:
            return (), 0
        chosen: list[tuple[str, int]] = []
        freed_bytes = 0
        for other, held in self._held.items():
            if freed_bytes >= excess_bytes:
                break
            if other != name and held.size_bytes and not held.busy and not held.pinned:
                chosen.append((other, held.size_bytes))
                freed_bytes += held.size_bytes
        for spared in reversed(chosen[:]):  # the last one may make those before it needless
            if freed_bytes - spared[1] >= excess_bytes:
                chosen.remove(spared)
                freed_bytes -= spared[1]
        return tuple(other for other, _ in chosen), freed_bytes

    def _arithmetic(self, name: str, size_bytes: int) -> str:
        staying = [
            f"'{other}' {_gib(held.size_bytes)} ({'pinned' if held.pinned else 'busy'})"
            for other, held in self._held.items()
            if other != name and (held.pinned or held.busy)
        ]
        staying_text = f", and {', '.join(staying)} cannot go now" if staying else ""
        return (
            f"model '{name}' needs {_gib(size_bytes)} of a memory budget of {_gib(self.budget_bytes)}{staying_text}"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
