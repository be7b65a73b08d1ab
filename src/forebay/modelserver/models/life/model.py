"""One model: its versions, and how they are replaced without losing a request."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from forebay.core.serving.ensemble import abreast
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.versions import chosen_versions, none_available
from forebay.modelserver.models.context import ServerContext
from forebay.modelserver.models.life.states import UNLOADED, State, not_ready
from forebay.modelserver.models.life.version import Version
from forebay.modelserver.ports import ModelView
from forebay.modelserver.repository import Described, same_but_instances

LATEST = -1
READY: Final = State.READY
"""Compiled code finds a constant of a module faster than a member of an enumeration."""


class Model:
    """A model that was requested by name, at startup or later."""

    def __init__(self, context: ServerContext, name: str) -> None:
        self._context = context
        self.name = name
        self.lock = asyncio.Lock()
        """Hold it while changing the model."""
        self.explicit = False
        """Loaded for its own sake, not only as a dependency of another model."""
        self.stamp = ""
        """Digest of the files that are served."""
        self.overridden = False
        """Its configuration comes from the load request, not from the repository."""
        self.reason = ""
        """Why the model has no versions at all."""
        self.dismissed = False
        """Unloaded since it was last requested, or never loaded: it does not affect server readiness."""
        self.described: Described | None = None
        """The description that is being served."""
        self.aborts = 0
        """How often loads were aborted; those that wait for `lock` then are aborted too."""
        self._adopting: Sequence[Version] = ()
        """Kept versions that are given another number of instances."""
        self._fresh: Sequence[Version] = ()
        """Versions that are being loaded."""
        self._stamps: dict[int, str] = {}
        self._versions: dict[int, Version] = {}
        self._views: dict[int, ModelView] = {}
        self._viewed = -1
        """`context.moves` when `_views` was built; a different value invalidates it."""

    @property
    def versions(self) -> list[Version]:
        """Versions that are or were served, or failed to load; ascending."""
        return [self._versions[number] for number in sorted(self._versions)]

    @property
    def ready(self) -> list[Version]:
        """Ready versions, ascending."""
        return [version for version in self.versions if version.state is State.READY]

    @property
    def wanted(self) -> bool:
        """Whether it should be served, or was tried: it affects server readiness."""
        return not self.dismissed and bool(self._versions or self.reason)

    def find(self, number: int) -> Version:
        """The version with that number, or the latest ready one (-1). Raises `Refused` with Triton's texts."""
        if number == LATEST:
            latest: Version | None = None
            for version in self._versions.values():
                if version.state is READY and (latest is None or version.number > latest.number):
                    latest = version
            if latest is None:
                raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{self.name}' has no available versions")
            return latest
        asked = self._versions.get(number)
        if asked is None:
            text = f"Request for unknown model: '{self.name}' version {number} is not found"
            raise Refused(Kind.NOT_FOUND, text)
        if asked.state is not READY:
            text = f"Request for unknown model: {not_ready(self.name, asked.text)}"
            raise Refused(Kind.UNAVAILABLE, text)
        return asked

    def view(self, number: int) -> ModelView:
        """What clients may know of the version that `find` returns. Raises `Refused`."""
        found = self.find(number)
        if self._viewed != self._context.moves:
            self._viewed = self._context.moves
            self._views.clear()
        view = self._views.get(found.number)
        if view is None or view.document is not found.document:
            versions = [version.text for version in self.ready]
            places = abreast(found.config, self._context.models.lookup)
            view = self._views[found.number] = ModelView(found.config, found.document, found.text, versions, places)
        return view

    async def load(self, described: Described, stamp: str, stamps: Mapping[int, str]) -> None:
        """Serve the versions that the policy chooses; old ones serve until all new ones are ready.

        `stamp` identifies the files of the whole model, `stamps` those of each version: unchanged versions are not
        reloaded, even if their instance count changes. Raises `Refused` if a version fails to load; the old ones keep
        serving. Hold `lock`.
        """
        numbers = chosen_versions(described.config.versions, tuple(described.versions))
        if not numbers:
            raise Refused(Kind.INVALID_ARGUMENT, none_available(self.name))
        before = self.described
        kept = self._kept(described, numbers, stamps)
        fresh = [Version(self._context, described, number) for number in numbers if number not in kept]
        for version in fresh:
            there = self._versions.get(version.number)
            if there is None or there.state is State.UNAVAILABLE:
                self._versions[version.number] = version
        await self._start(fresh)
        failed = await self._adopt(list(kept.values()), described)
        if failed is not None:
            await self._retire([version for version in fresh if version.state is State.READY])
            raise failed
        old = [version for version in self.ready if version not in fresh and version.number not in kept]
        for version in fresh:
            self._versions[version.number] = version
        self.described, self.stamp, self._stamps = described, stamp, dict(stamps)
        self.dismiss_others(numbers)
        await self._retire(old)
        if before is not None and before is not described:
            before.release()

    async def load_version(self, described: Described, stamp: str, stamps: Mapping[int, str], number: int) -> bool:
        """Load one version next to the others. Returns False if it already serves unchanged. Raises `Refused`.

        Hold `lock`.
        """
        before = self.described
        if before is not None and (before.document != described.document or before.temporary is not None):
            text = (
                f"model '{self.name}' has a configuration that differs from its loaded versions: load the whole model"
            )
            raise Refused(Kind.INVALID_ARGUMENT, text)
        there = self._versions.get(number)
        serves = there is not None and there.state is State.READY
        if serves and stamps.get(number) == self._stamps.get(number):
            return False
        fresh = Version(self._context, described, number)
        if not serves:
            self._versions[number] = fresh
        await self._start([fresh])
        self._versions[number] = fresh
        self.described = described
        self._stamps[number] = stamps.get(number, "")
        if self.stamp != stamp:
            self.stamp = ""  # so that a later load of the whole model compares each version
        if there is not None and serves:
            await self._retire([there])
        return True

    async def unload(self, reason: str = UNLOADED, number: int = LATEST) -> None:
        """Stop serving all versions, or one. Hold `lock`."""
        await self._retire([version for version in self.ready if number in (LATEST, version.number)], reason)
        if not self.ready:
            self.explicit = False
            self.stamp = ""
            if self.described is not None:
                self.described.release()
                self.described = None

    async def suspend(self, reason: str) -> None:
        """Stop serving all versions until their dependencies are back. Hold `lock`."""
        kept = self.explicit, self.stamp, self.described
        self.described = None  # else `unload` would release its files
        await self.unload(reason)
        self.explicit, self.stamp, self.described = kept

    def give_up(self) -> None:
        """Abort the load in progress, or the change of instances, and the loads that wait for it."""
        self.aborts += 1
        for version in self._fresh:
            version.give_up()
        for process in [version.process for version in self._adopting if version.process is not None]:
            if self._context.drained:
                process.stop()  # it may wait for the batches of an instance that is removed
            else:
                process.give_up()

    def dismiss(self, number: int = LATEST) -> None:
        """Clear the failure of all versions, or one, so that it does not affect server readiness."""
        self.reason = ""
        self.dismissed = True
        for version in self._versions.values():
            if number in (LATEST, version.number):
                version.dismiss()

    def dismiss_others(self, numbers: Iterable[int]) -> None:
        """Clear the failures of versions that are not to be served any more: their folder is gone, say."""
        for number, version in self._versions.items():
            if number not in numbers:
                version.dismiss()

    async def _start(self, fresh: Sequence[Version]) -> None:
        """Load all of these versions, or none. Raises `Refused`."""
        self._fresh = fresh
        results = await asyncio.gather(*(version.load() for version in fresh), return_exceptions=True)
        self._fresh = ()
        failed = [(version, error) for version, error in zip(fresh, results, strict=True) if error is not None]
        if not failed:
            return
        await self._retire([version for version in fresh if version.state is State.READY])
        for _, error in failed:
            if not isinstance(error, Refused):
                raise error
        text = "".join(f"version {version.text} is at UNAVAILABLE state: {version.reason};" for version, _ in failed)
        raise Refused(Kind.INVALID_ARGUMENT, text)

    async def _adopt(self, kept: Sequence[Version], described: Described) -> Refused | None:
        """Let all of these versions adopt a configuration, or none; returns why not."""
        adopted: list[tuple[Version, Described]] = []
        failed: Refused | None = None
        self._adopting = kept
        try:
            for version in kept:
                before = version.described
                await version.adopt(described)
                adopted.append((version, before))
        except Refused as refused:
            failed = refused
        self._adopting = ()
        if failed is not None:
            for version, before in adopted:
                with suppress(Refused):
                    await version.adopt(before)
        return failed

    async def _retire(self, versions: Iterable[Version], reason: str = UNLOADED) -> None:
        """Unload versions; used for those that are replaced, too."""
        await asyncio.gather(*(version.unload(reason) for version in versions))

    def _kept(self, described: Described, numbers: Sequence[int], stamps: Mapping[int, str]) -> dict[int, Version]:
        """Versions that keep running unchanged across a reload. Not those that are being woken: their instances are
        being started."""
        before = self.described
        if before is None or described.config.steps or not same_but_instances(before, described):
            return {}
        return {
            version.number: version
            for version in self.ready
            if version.number in numbers
            and stamps.get(version.number) == self._stamps.get(version.number)
            and not (version.dormant and version.process is not None)
        }
