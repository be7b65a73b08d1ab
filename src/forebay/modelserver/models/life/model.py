"""One model: its versions, and how they are replaced without a request being lost."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from forebay.core.serving.ensemble import abreast
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.versions import chosen_versions, none_available
from forebay.modelserver.models.life.states import UNLOADED, State
from forebay.modelserver.models.life.version import Version, not_ready
from forebay.modelserver.models.site import Site
from forebay.modelserver.ports import ModelView
from forebay.modelserver.repository import Described, same_but_instances

LATEST = -1


class Model:
    """A name in the repository that was asked to be served."""

    def __init__(self, site: Site, name: str) -> None:
        self._site = site
        self.name = name
        self.lock = asyncio.Lock()
        """Held by whoever changes the model."""
        self.explicit = False
        """It was asked for itself, not only because another needs it."""
        self.stamp = ""
        """Of the files that are served."""
        self.reason = ""
        """Why it has no versions at all."""
        self.dismissed = False
        """It was unloaded since it was last asked for, or came to nothing before: the server is ready without it."""
        self.described: Described | None = None
        """What is served, as it was read."""
        self._fresh: Sequence[Version] = ()
        """Those that are being loaded."""
        self._stamps: dict[int, str] = {}
        self._versions: dict[int, Version] = {}
        self._views: dict[int, ModelView] = {}
        self._viewed = -1
        """The state of the site that these are of."""

    @property
    def versions(self) -> list[Version]:
        """Those that are or were served or tried, ascending."""
        return [self._versions[number] for number in sorted(self._versions)]

    @property
    def ready(self) -> list[Version]:
        """Those that serve, ascending."""
        return [version for version in self.versions if version.state is State.READY]

    def find(self, number: int) -> Version:
        """The version of that number, or the latest that serves (-1). Raises `Refused` with Triton's texts."""
        if number == LATEST:
            latest: Version | None = None
            for version in self._versions.values():
                if version.state is State.READY and (latest is None or version.number > latest.number):
                    latest = version
            if latest is None:
                raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{self.name}' has no available versions")
            return latest
        asked = self._versions.get(number)
        if asked is None:
            text = f"Request for unknown model: '{self.name}' version {number} is not found"
            raise Refused(Kind.NOT_FOUND, text)
        if asked.state is not State.READY:
            text = f"Request for unknown model: {not_ready(self.name, asked.text)}"
            raise Refused(Kind.UNAVAILABLE, text)
        return asked

    def view(self, number: int) -> ModelView:
        """What clients may know of the version that `find` gives. Raises `Refused`."""
        found = self.find(number)
        if self._viewed != self._site.moves:
            self._viewed = self._site.moves
            self._views.clear()
        view = self._views.get(found.number)
        if view is None or view.document is not found.document:
            versions = [version.text for version in self.ready]
            places = abreast(found.config, self._site.others.lookup)
            view = self._views[found.number] = ModelView(found.config, found.document, found.text, versions, places)
        return view

    async def load(self, described: Described, stamp: str, stamps: Mapping[int, str]) -> None:
        """Serve the versions that the policy chooses of these; old ones serve until all new ones can.

        `stamp` tells whether anything of the model has changed, `stamps` which versions have: those that have not are
        not loaded anew, also if they are to have other instances. Raises `Refused` if a version cannot be loaded: the
        old ones go on then. The caller holds the lock.
        """
        numbers = chosen_versions(described.config.versions, tuple(described.versions))
        if not numbers:
            raise Refused(Kind.INVALID_ARGUMENT, none_available(self.name))
        before = self.described
        kept = self._kept(described, numbers, stamps)
        fresh = [Version(self._site, described, number) for number in numbers if number not in kept]
        for version in fresh:
            there = self._versions.get(version.number)
            if there is None or there.state is State.UNAVAILABLE:
                self._versions[version.number] = version
        for kept_one in kept.values():
            await kept_one.adopt(described)
        await self._start(fresh)
        old = [version for version in self.ready if version not in fresh and version.number not in kept]
        for version in fresh:
            self._versions[version.number] = version
        self.described, self.stamp, self._stamps = described, stamp, dict(stamps)
        await self._retire(old)
        if before is not None and before is not described:
            before.release()

    async def bring(self, described: Described, stamp: str, stamps: Mapping[int, str], number: int) -> bool:
        """Serve one version beside those that do, which stay as they are; False: it does, just so. Raises `Refused`.

        The caller holds the lock.
        """
        before = self.described
        if before is not None and (before.config != described.config or before.temporary is not None):
            text = f"model '{self.name}' has another configuration than the versions that serve: load all of it"
            raise Refused(Kind.INVALID_ARGUMENT, text)
        there = self._versions.get(number)
        serves = there is not None and there.state is State.READY
        if serves and stamps.get(number) == self._stamps.get(number):
            return False
        fresh = Version(self._site, described, number)
        if not serves:
            self._versions[number] = fresh
        await self._start([fresh])
        self._versions[number] = fresh
        self.described = described
        self._stamps[number] = stamps.get(number, "")
        if self.stamp != stamp:
            self.stamp = ""  # a load of the whole model must look at each version
        if there is not None and serves:
            await self._retire([there])
        return True

    async def unload(self, reason: str = UNLOADED, number: int = LATEST) -> None:
        """Stop serving all versions, or one. The caller holds the lock."""
        await self._retire([version for version in self.ready if number in (LATEST, version.number)], reason)
        if not self.ready:
            self.explicit = False
            self.stamp = ""
            if self.described is not None:
                self.described.release()
                self.described = None

    async def suspend(self, reason: str) -> None:
        """Stop serving all versions until what they need is there again. The caller holds the lock."""
        kept = self.explicit, self.stamp, self.described
        self.described = None  # or its files would be given up
        await self.unload(reason)
        self.explicit, self.stamp, self.described = kept

    def give_up(self) -> None:
        """Let a load that is under way fail now."""
        for version in self._fresh:
            version.give_up()

    def dismiss(self, number: int = LATEST) -> None:
        """Forget why all versions, or one, could not be served: nobody wants them any more."""
        self.reason = ""
        self.dismissed = True
        for version in self._versions.values():
            if number in (LATEST, version.number):
                version.dismiss()

    async def _start(self, fresh: Sequence[Version]) -> None:
        """Load all of them, or none."""
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

    async def _retire(self, versions: Iterable[Version], reason: str = UNLOADED) -> None:
        """End versions, those that are replaced among them."""
        await asyncio.gather(*(version.unload(reason) for version in versions))

    def _kept(self, described: Described, numbers: Sequence[int], stamps: Mapping[int, str]) -> dict[int, Version]:
        """The versions that go on serving as they are."""
        before = self.described
        if before is None or described.config.steps or not same_but_instances(before.config, described.config):
            return {}
        return {
            version.number: version
            for version in self.ready
            if version.number in numbers and stamps.get(version.number) == self._stamps.get(version.number)
        }
