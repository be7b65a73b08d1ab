"""Admission of instances that share resources: the rate limiter applied to real instances."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from forebay.core.serving.config import InstanceGroup, Resource
from forebay.core.serving.errors import Refused
from forebay.core.serving.limiter import Amount, Limiter


class Key(NamedTuple):
    """One instance of one load of a model version."""

    owner: int
    instance: int


class RateLimiter:
    """The resources of the whole server."""

    def __init__(self, amounts: Iterable[Amount] = ()) -> None:
        self._limiter: Limiter[Key] = Limiter(amounts)
        self._waiting: dict[Key, Callable[[], None]] = {}
        self._granted: set[Key] = set()
        self._owners = 0
        self._due = False
        """Whether what was released is about to be granted."""

    def new_owner(self) -> int:
        """A unique number for a version that has instances."""
        self._owners += 1
        return self._owners

    def add(self, key: Key, resources: Sequence[Resource], device: int, priority: int) -> None:
        """Register an instance. Raises `Refused` if the resources can never suffice."""
        self._limiter.add(key, resources, device, priority)
        self._grant()

    def check(self, groups: Iterable[InstanceGroup], instead_of: Collection[Key] = ()) -> None:
        """Raises `Refused`, as `add` would, if an instance of these groups could never run in place of others."""
        wanted = [(group.resources, device) for group in groups for device in group.gpus or (0,)]
        self._limiter.check(wanted, instead_of)

    def remove(self, key: Key) -> None:
        """Unregister an instance and release what it holds."""
        self._waiting.pop(key, None)
        self._granted.discard(key)
        self._limiter.remove(key)
        self._grant()

    def take(self, key: Key, wake: Callable[[], None]) -> bool:
        """Whether the instance may run now; if not, `wake` is called once it may."""
        if key in self._granted:
            return True
        if key not in self._waiting:
            self._waiting[key] = wake
            self._limiter.ask(key)
            self._grant(asking=key)
        return key in self._granted

    def give_back(self, key: Key) -> None:
        """Release the resources of an instance that has finished its batch. They are granted a moment later: it may
        want to run again at once, and have priority over those that wait.
        """
        if key in self._granted:
            self._granted.remove(key)
            self._limiter.release(key)
            if not self._due:
                self._due = True
                asyncio.get_running_loop().call_soon(self._grant)

    def withdraw(self, key: Key) -> None:
        """The instance cannot run now: it stops waiting, and releases what it was given."""
        if self._waiting.pop(key, None) is not None:
            self._limiter.withdraw(key)
            self._grant()  # to those behind it
        self.give_back(key)

    def _grant(self, asking: Key | None = None) -> None:
        """Grant what is free, and wake its instances, except for the one that is asking now."""
        self._due = False
        for key in self._limiter.grants():
            self._granted.add(key)
            wake = self._waiting.pop(key)
            if key != asking:
                wake()


class _Needs(NamedTuple):
    resources: Sequence[Resource]
    device: int
    priority: int


class InstanceResources:
    """The instances of one version with the resources that their groups require. `rate_limiter` None: no limits."""

    def __init__(self, rate_limiter: RateLimiter | None, wake: Callable[[], None]) -> None:
        self._rate_limiter = rate_limiter
        self._wake = wake
        self._owner = rate_limiter.new_owner() if rate_limiter is not None else 0
        self._registered: dict[int, _Needs] = {}

    @property
    def scarce(self) -> bool:
        """Whether instances may have to wait for resources."""
        return self._rate_limiter is not None

    @property
    def keys(self) -> frozenset[Key]:
        """The instances that are registered."""
        return frozenset(Key(self._owner, instance) for instance in self._registered)

    def set(self, groups: Iterable[InstanceGroup]) -> None:
        """Register the instances of these groups; those that need the same as before keep what they hold.

        Raises `Refused`, with those of before, if one could never run.
        """
        if self._rate_limiter is None:
            return
        before = [self._registered[instance] for instance in sorted(self._registered)]
        try:
            self._register(self._rate_limiter, _needs(groups))
        except Refused:
            self._register(self._rate_limiter, before)
            raise

    def _register(self, rate_limiter: RateLimiter, wanted: Sequence[_Needs]) -> None:
        for instance, needs in list(self._registered.items()):
            if instance >= len(wanted) or wanted[instance] != needs:
                rate_limiter.remove(Key(self._owner, instance))
                del self._registered[instance]
        for instance, needs in enumerate(wanted):
            if instance not in self._registered:
                rate_limiter.add(Key(self._owner, instance), *needs)
                self._registered[instance] = needs

    def close(self) -> None:
        """Unregister all instances."""
        if self._rate_limiter is not None:
            self._register(self._rate_limiter, ())

    def take(self, instance: int) -> bool:
        """Whether the instance may run now; if not, the version is woken once it may."""
        return self._rate_limiter is None or (
            instance in self._registered and self._rate_limiter.take(Key(self._owner, instance), self._wake)
        )

    def withdraw(self, instance: int) -> None:
        """The instance cannot run now: others may have its turn."""
        if self._rate_limiter is not None:
            self._rate_limiter.withdraw(Key(self._owner, instance))

    def give_back(self, instance: int) -> None:
        """Release the resources of an instance that has finished its batch."""
        if self._rate_limiter is not None:
            self._rate_limiter.give_back(Key(self._owner, instance))


def _needs(groups: Iterable[InstanceGroup]) -> list[_Needs]:
    """What each instance needs."""
    return [
        _Needs(group.resources, device, group.priority)
        for group in groups
        for device in group.gpus or (0,)
        for _ in range(group.count)
    ]
