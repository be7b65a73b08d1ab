"""The rate limiter: an instance runs only while its resources are free, and priorities share turns.

The rules are those of Triton's `--rate-limit=execution_count`, with two differences: an instance waiting for scarce
resources blocks only those that need the same ones, and a late starter does not catch up on others' past turns.
"""

from bisect import insort
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from forebay.core.serving.config import Resource
from forebay.core.serving.errors import Kind, Refused

K = TypeVar("K", bound=Hashable)

Place = tuple[int | None, str]
"""A device (None: the resource is global) and a resource's name."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of a resource exists: on one device, or (None) on each. Of a global one the largest counts."""

    name: str
    count: int
    device: int | None = None


class _Instance(Generic[K]):
    __slots__ = ("key", "needs", "number", "passed", "runs", "stride", "waits")

    def __init__(self, key: K, needs: dict[Place, int], stride: int) -> None:
        self.key = key
        self.needs = needs
        self.stride = stride
        self.passed = 0
        """Its turns so far, each counted as `stride`: the lowest goes next."""
        self.number = 0
        self.waits = False
        self.runs = False

    def __lt__(self, other: "_Instance[K]") -> bool:
        return (self.passed, self.number) < (other.passed, other.number)


class Limiter(Generic[K]):
    """Decides which instances may run. A key stands for one instance of one model version.

    The caller calls `ask` when an instance has something to run, then runs all that `grants` returns. It calls
    `release` when a run has ended, however it went, and `grants` again after each `release`, `withdraw`, `add` and
    `remove`. Of instances that want to run at the same time, one of priority p gets turns in proportion to 1/p.
    """

    __slots__ = ("_amounts", "_clock", "_instances", "_limits", "_line", "_number", "_used")

    def __init__(self, amounts: Iterable[Amount] = ()) -> None:
        """Without `amounts`, each resource exists in the largest amount that any instance needs."""
        self._amounts = tuple(amounts)
        self._instances: dict[K, _Instance[K]] = {}
        self._limits: dict[Place, int] = {}
        self._used: dict[Place, int] = {}
        self._line: list[_Instance[K]] = []
        self._clock = 0
        self._number = 0

    def add(self, key: K, resources: Sequence[Resource], device: int = 0, priority: int = 0) -> None:
        """Add an instance. Raises Refused (INVALID_ARGUMENT, Triton's texts) if it could never run."""
        assert key not in self._instances, f"{key} was already added"
        needs = _needs(resources, device)
        limits = self._limits_with(needs)
        self._instances[key] = _Instance(key, needs, max(1, priority))
        self._limits = limits

    def check(self, wanted: Iterable[tuple[Sequence[Resource], int]], instead_of: Collection[K] = ()) -> None:
        """Raises `Refused`, as `add` would, if instances with these resources and devices could never all be added.

        `instead_of`: those that they would replace.
        """
        most: dict[Place, int] = {}
        for resources, device in wanted:
            for place, count in _needs(resources, device).items():
                most[place] = max(most.get(place, 0), count)
        self._limits_with(most, instead_of)

    def remove(self, key: K) -> None:
        """Remove an instance and free what it holds. Unknown ones are ignored."""
        if key not in self._instances:
            return
        self.withdraw(key)
        self.release(key)
        del self._instances[key]
        self._limits = self._limits_with({})

    def ask(self, key: K) -> None:
        """The instance, which is neither waiting nor running, wants to run once."""
        instance = self._instances[key]
        assert not instance.waits, f"{key} is already waiting"
        assert not instance.runs, f"{key} is running"
        self._number += 1
        instance.number = self._number
        instance.passed = max(instance.passed, self._clock)
        instance.waits = True
        insort(self._line, instance)

    def withdraw(self, key: K) -> None:
        """Cancel its `ask`; ignored unless it is waiting."""
        instance = self._instances.get(key)
        if instance is not None and instance.waits:
            instance.waits = False
            self._line.remove(instance)

    def grants(self) -> list[K]:
        """The instances that start now, in order; they hold their resources until `release`."""
        granted: list[K] = []
        left: list[_Instance[K]] = []
        # reserved for earlier ones that must wait, as smaller ones could overtake them forever
        kept: dict[Place, int] = {}
        for instance in self._line:
            if all(
                self._used.get(place, 0) + kept.get(place, 0) + count <= self._limits[place]
                for place, count in instance.needs.items()
            ):
                self._start(instance)
                granted.append(instance.key)
            else:
                for place, count in instance.needs.items():
                    kept[place] = kept.get(place, 0) + count
                left.append(instance)
        self._line = left
        return granted

    def release(self, key: K) -> None:
        """The run has ended or never began: free its resources; ignored if it holds none."""
        instance = self._instances.get(key)
        if instance is not None and instance.runs:
            instance.runs = False
            for place, count in instance.needs.items():
                self._used[place] -= count

    def _start(self, instance: _Instance[K]) -> None:
        for place, count in instance.needs.items():
            self._used[place] = self._used.get(place, 0) + count
        self._clock = max(self._clock, instance.passed)
        instance.passed += instance.stride
        instance.waits = False
        instance.runs = True

    def _limits_with(self, needs: dict[Place, int], without: Collection[K] = ()) -> dict[Place, int]:
        most = dict(needs)
        for instance in [each for key, each in self._instances.items() if key not in without]:
            for place, count in instance.needs.items():
                most[place] = max(most.get(place, 0), count)
        both = sorted({name for device, name in most if device is not None and (None, name) in most})
        if both:
            raise Refused(
                Kind.INVALID_ARGUMENT,
                f'Resource "{both[0]}" is present as both global and device-specific resource in the model'
                " configuration.",
            )
        if not self._amounts:
            return most
        limits = {place: self._amount(*place) for place in most}
        short = next((place for place in most if limits[place] < most[place]), None)
        if short is not None:
            raise Refused(
                Kind.INVALID_ARGUMENT,
                f'Resource count for "{short[1]}" is limited to {limits[short]} which will prevent scheduling of'
                f" one or more model instances, the minimum required count is {most[short]}",
            )
        return limits

    def _amount(self, device: int | None, name: str) -> int:
        return max(
            (
                each.count
                for each in self._amounts
                if each.name == name and (device is None or each.device in {None, device})
            ),
            default=0,
        )


def _needs(resources: Sequence[Resource], device: int) -> dict[Place, int]:
    return {(None if each.is_global else device, each.name): each.count for each in resources if each.count}
