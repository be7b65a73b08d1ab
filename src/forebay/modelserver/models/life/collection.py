"""All models: what the repositories hold, which of it is served, and the order of loads."""

import asyncio
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.ensemble import lacks, load_order
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.versions import chosen_versions
from forebay.modelserver.models.context import ServerContext
from forebay.modelserver.models.life.model import LATEST, Model
from forebay.modelserver.models.life.stamps import stamps
from forebay.modelserver.models.life.states import UNLOADED, State
from forebay.modelserver.models.life.version import Version
from forebay.modelserver.models.options import Control
from forebay.modelserver.ports import IndexEntry
from forebay.modelserver.repository import BadModel, Described, Found, named, read, scan
from forebay.modelserver.waiting import all_of

FILE: Final = "file:"
VERSION: Final = "version"
"""Parameter of load and unload requests that names a single version. An extension of ours."""
VERSION_DIGITS_MAX: Final = 19
"""Those of the largest number; Python refuses to convert thousands."""
INDEX_FRESH_S: Final = 1.0
"""The index needs another scan of the repositories only if the last one is older than this."""


@dataclass(slots=True)
class LoadSpec:
    """How to load one model; may override its configuration and files."""

    override: str | None = None
    files: dict[str, bytes] | None = None
    number: int = LATEST
    """Load only this version, next to those that serve; LATEST: the versions that the version policy chooses."""


class Collection:
    """All models, by name."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._models: dict[str, Model] = {}
        self._found: dict[str, Found] = {}
        self._polled: Mapping[str, Found] = {}
        """What the last poll found: `_found` may have been renewed for the index since."""
        self._found_at = -INDEX_FRESH_S
        self._scan_began = 0.0
        """When the scan began whose result is in `_found`."""
        self._refreshing = asyncio.Lock()
        self._closing = False
        self._places = asyncio.Semaphore(context.options.loads_max)

    def find(self, name: str, number: int) -> Version:
        """The version that serves a request (-1: the latest). Raises `Refused` with Triton's texts."""
        return self.model(name).find(number)

    def model(self, name: str) -> Model:
        """A model that is or was served. Raises `Refused` with Triton's text."""
        model = self._models.get(name)
        if model is None:
            raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return model

    def lookup(self, name: str, number: int) -> ModelConfig | None:
        """The configuration of a ready version (-1: the latest), or None."""
        try:
            return self.find(name, number).config
        except Refused:
            return None

    @property
    def served(self) -> list[Version]:
        """All ready versions, ordered by name and number."""
        return [version for name in sorted(self._models) for version in self._models[name].ready]

    @property
    def all_ready(self) -> bool:
        """Whether everything that should be served is ready. Models unloaded on request do not count."""
        return all(
            version.healthy or _unloaded(version) for model in self._models.values() for version in model.versions
        ) and not any(model.reason and not model.dismissed for model in self._models.values())

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """The repository index: each model and version found by the last scan, with its state. Unloaded models
        without a folder are omitted.
        """
        entries = []
        for name in sorted({*self._found, *self._models}):
            model = self._models.get(name)
            versions = model.versions if model is not None else ()
            for version in versions:
                if version.state is State.READY or not (
                    ready_only or (name not in self._found and _unloaded(version))
                ):
                    entries.append(IndexEntry(name, version.text, version.state, version.reason))
            if versions or ready_only or (name not in self._found and not (model and model.reason)):
                continue
            reason = model.reason if model is not None else "; ".join(self._found[name].problems)
            entries.append(IndexEntry(name, state=State.UNAVAILABLE, reason=reason) if reason else IndexEntry(name))
        return entries

    async def refresh(self) -> None:
        """Scan the repositories for the index, unless the last scan is recent."""
        async with self._refreshing:
            if monotonic() - self._found_at >= INDEX_FRESH_S:
                with suppress(OSError, BadModel):  # the last scan counts
                    await self._scan()

    async def start(self) -> list[str]:
        """Load the models to serve at startup. Returns the error texts of those that failed."""
        options = self._context.options
        await self._scan()
        self._polled = self._found
        for name in sorted(options.pinned.difference(self._found)):
            self._context.log.warning("--pin: no repository has this model yet", model=name)
        names: Iterable[str] = self._found
        if options.control is Control.EXPLICIT and options.startup != ("*",):
            names = options.startup
        specs = {name: LoadSpec() for name in names}
        failed = await self._load(specs)
        return [text if f"'{name}'" in text else f"model '{name}': {text}" for name, text in failed.items()]

    async def load(
        self, name: str, parameters: Mapping[str, str | bytes | int | bool], *, nested: bool = False
    ) -> None:
        """Load or reload a model at a client's request, or (`nested`) a model's. Raises `Refused`."""
        self._require_explicit()
        if not name.strip():
            raise Refused(Kind.INVALID_ARGUMENT, "Model name cannot be empty. Please enter a valid name to deploy.")
        if name.strip() == ".." or "/" in name:
            text = f"invalid model name '{name}', model name must not contain path traversal characters"
            raise Refused(Kind.INVALID_ARGUMENT, text)
        spec = load_spec_of(parameters)
        unread = f"failed to load '{name}', failed to poll from model repository"
        try:
            await self._scan()
        except OSError as error:
            raise Refused(Kind.INTERNAL, f"{unread}: {error.strerror}") from None
        if name not in self._found and spec.override is None:
            raise Refused(Kind.INTERNAL, unread)
        if spec.number != LATEST:
            await self._check_version(name, spec.number)
        before = {each: (model.versions, model.wanted) for each, model in self._models.items()}
        failed = await self._load({name: spec}, nested=nested)
        for each in failed:  # also of models that it depends on
            model = self._models[each]
            tried, wanted = before.get(each, ([], False))
            if not wanted and model.versions == tried:  # nothing was tried, so server readiness must not change
                model.dismissed = True
                model.reason = model.reason if each in self._found else ""
        if name in failed:
            raise Refused(Kind.INVALID_ARGUMENT, f"load failed for model '{name}': {failed[name]}\n")

    async def _check_version(self, name: str, number: int) -> None:
        """Reject an impossible version up front, so that it does not count as a failure of the model. Raises
        `Refused`.
        """
        found = self._found[name]
        there = tuple(found.versions)
        if number in there:
            try:
                described = await asyncio.to_thread(read, found, None, None, self._context.options.rules)
            except Refused:
                return  # the load reports why
            there = chosen_versions(described.config.versions, tuple(described.versions))
            if number in there:
                return
        which = "its version policy chooses" if number in found.versions else "the repository has"
        text = f"version {number} of model '{name}' cannot be loaded: {which} {', '.join(map(str, there)) or 'none'}"
        raise Refused(Kind.INVALID_ARGUMENT, text)

    async def unload(self, name: str, dependents: bool, number: int = -1) -> None:
        """Unload a model at a client's request; does nothing for an unknown model. Raises `Refused`."""
        self._require_explicit()
        model = self._models.get(name)
        if model is None:
            return
        needs = _needs(model)
        if number < 0:
            model.give_up()
        async with model.lock:
            await model.unload(number=number)
            model.dismiss(number)
        self._invalidate_caches({name})  # an older version may answer from now on
        await self._recheck({name})
        for need in sorted(needs) if dependents and not model.ready else ():
            part = self._models.get(need)
            if part is not None and not part.explicit and not self._users(need):
                await self.unload(need, True)

    async def poll(self) -> None:
        """Reconcile the served models with the repositories."""
        await self._scan()
        before, seen = self._polled, self._found
        gone = [name for name in self._models if name not in self._found]
        hidden = [name for name in gone if name in before and _is_file_still(before[name])]
        if hidden:
            self._context.log.warning(
                "model files are no longer served: a model folder next to them takes precedence", models=hidden
            )
        for name in gone:
            async with self._models[name].lock:
                await self._models[name].unload()
                self._models[name].dismiss()
        if gone:
            await self._recheck(set(gone))
        changed = {
            name: LoadSpec()
            for name, found in self._found.items()
            if name not in before or before[name].stamp != found.stamp
        }
        await self._load(changed)
        self._polled = seen  # not if it has failed unexpectedly: the next poll tries again

    def give_up(self, *, drained: bool = False) -> None:
        """Abort all loads in progress and reject new ones: the server is stopping. `drained`: running requests have
        had their time, and are failed.
        """
        self._closing = True
        self._context.drained = self._context.drained or drained
        for model in self._models.values():
            model.give_up()

    async def close(self) -> None:
        """Unload all models; each drains within its own time limit."""
        self.give_up()
        await all_of([_closed(model) for model in self._models.values()])

    def _require_explicit(self) -> None:
        if self._context.options.control is not Control.EXPLICIT:
            text = "explicit model load / unload is not allowed if polling is enabled"
            raise Refused(Kind.UNAVAILABLE, text)

    async def _scan(self) -> None:
        began = monotonic()
        found = await asyncio.to_thread(self._scanned)
        if began >= self._scan_began:  # else a later scan was faster, and this one may have missed what it has seen
            self._scan_began = began
            self._found = {each.name: each for each in found}
            self._found_at = monotonic()

    def _scanned(self) -> list[Found]:
        options = self._context.options
        return scan(*options.repositories, linked=options.linked)

    async def _load(self, specs: Mapping[str, LoadSpec], *, nested: bool = False) -> dict[str, str]:
        """Load models after the models that they depend on, then recheck their dependents. Returns errors by model
        name. `nested`: beyond `loads_max`, as the loads that have the places may wait for this one.
        """
        described: dict[str, Described] = {}
        failed: dict[str, str] = {}
        wanted = dict(specs)
        for name in wanted:
            self._models.setdefault(name, Model(self._context, name)).explicit = True
        pending = list(wanted)
        for name in pending:  # the list grows while it is iterated
            self._models.setdefault(name, Model(self._context, name)).dismissed = False
            try:
                described[name] = await asyncio.to_thread(self._read, name, wanted[name])
            except Refused as refused:
                failed[name] = refused.text
                continue
            for need in described[name].config.needs:
                if need in self._found and need not in wanted and not self._overrides(need):
                    wanted[need] = LoadSpec()
                    pending.append(need)
        needs = {
            name: {need for need in each.config.needs if need in described or not self._serves(need)}
            for name, each in described.items()
        }
        order, circular = load_order(needs, {name for name, each in described.items() if each.config.calls})
        failed.update(circular)
        done = {name: asyncio.Event() for name in order}
        changed: set[str] = set()

        async def run(name: str) -> None:
            try:
                for need in sorted(needs[name]):
                    if need in done:
                        await done[need].wait()
                async with nullcontext() if nested else self._places:
                    moved = bool(described[name].config.steps) and not changed.isdisjoint(needs[name])
                    if await self._load_one(name, described[name], wanted[name], moved):
                        changed.add(name)
            except Refused as refused:
                failed[name] = refused.text
            finally:
                done[name].set()

        await all_of([run(name) for name in order])
        for name, text in failed.items():
            self._note_failure(name, text)
        self._invalidate_caches(changed)
        await self._recheck(changed, but=set(wanted))
        return failed

    async def _load_one(self, name: str, described: Described, spec: LoadSpec, moved: bool) -> bool:
        """Load a model or one of its versions. `moved`: a step of it has just been reloaded. Returns False if it is
        already served unchanged. Raises `Refused`.
        """
        found = self._found.get(name)
        stamp = found.stamp if found is not None and spec.files is None else ""
        model = self._models.setdefault(name, Model(self._context, name))
        aborts = model.aborts
        async with model.lock:
            if self._closing:
                raise Refused(Kind.UNAVAILABLE, "the server is stopping")
            if model.aborts != aborts:
                described.release()
                raise Refused(Kind.UNAVAILABLE, "it has been unloaded meanwhile")
            if spec.number != LATEST:
                model.reason = ""
                return await model.load_version(
                    described, stamp, await asyncio.to_thread(stamps, found, described), spec.number
                )
            before = model.described.document if model.described is not None and stamp == model.stamp else None
            chosen = chosen_versions(described.config.versions, tuple(described.versions))
            serves = {version.number for version in model.ready}
            # a version may have been unloaded on its own, or have failed since
            if stamp and before == described.document and not moved and serves.issuperset(chosen):
                model.dismiss_others(chosen)
                return False
            model.reason = ""
            try:
                await model.load(described, stamp, await asyncio.to_thread(stamps, found, described))
            except BaseException:
                described.release()
                raise
            model.overridden = spec.override is not None
            return True

    def _overrides(self, name: str) -> bool:
        """Whether a model serves a configuration that only another load of its own may replace."""
        model = self._models.get(name)
        return model is not None and model.overridden and bool(model.ready)

    def _serves(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and bool(model.ready)

    def _read(self, name: str, spec: LoadSpec) -> Described:
        found = self._found.get(name)
        if found is None:
            if spec.override is None:
                raise Refused(Kind.INTERNAL, f"failed to load '{name}', failed to poll from model repository")
            found = named(name)
        described = read(found, spec.override, spec.files, self._context.options.rules)
        for warning in described.warnings:
            self._context.log.warning("model configuration", model=name, warning=warning)
        return described

    def _note_failure(self, name: str, text: str) -> None:
        model = self._models.setdefault(name, Model(self._context, name))
        if not model.ready and not model.dismissed:
            model.reason = text
        self._context.log.error("model not loaded", model=name, reason=text)

    def _invalidate_caches(self, changed: Iterable[str]) -> None:
        """Invalidate cached responses of all models that depend, directly or transitively, on a changed one."""
        pending = list(changed)
        for name in pending:  # the list grows while it is iterated
            users = [user for user in self._users(name) if user not in pending]
            pending += users
            for user in users:
                for version in self._models[user].ready:
                    version.invalidate_cache()

    async def _recheck(self, changed: set[str], but: Names[str] = ()) -> None:
        """Unload dependents of changed models that now lack a dependency, and reload those that lack none any more.

        Ensembles are always rebuilt. Models that only call others keep running: they look up the callee on each call.
        """
        affected = sorted({user for name in changed for user in self._users(name)} - set(but))
        moved = {name for name in affected if await self._follows(self._models[name])}
        if moved:
            await self._recheck(moved, but)

    async def _follows(self, model: Model) -> bool:
        """Update a model one of whose dependencies has changed. Returns whether it changed as well."""
        async with model.lock:
            described = model.described
            problems = lacks(described.config, self.lookup) if described is not None else []
            if problems and model.ready:
                await model.suspend(f"{UNLOADED}: {'; '.join(problems)}")
                return True
            if described is not None and not problems and (described.config.steps or not model.ready):
                await self._renew(model, described)
                return True
        return False

    async def _renew(self, model: Model, described: Described) -> None:
        """Reload a model; an ensemble is read again if it was loaded from the repository, which still has it."""
        name = model.name
        fresh = described
        try:
            if described.config.steps and name in self._found and not model.overridden:
                fresh = await asyncio.to_thread(self._read, name, LoadSpec())
            await model.load(fresh, model.stamp, {})
        except Refused as refused:
            self._note_failure(name, refused.text)

    def _users(self, name: str) -> list[str]:
        """The models that have this one as an ensemble step or call it."""
        return [user for user, model in sorted(self._models.items()) if name in _needs(model)]


def _unloaded(version: Version) -> bool:
    """Whether nobody expects it to serve."""
    return version.state is State.UNAVAILABLE and version.reason.startswith(UNLOADED)


def _is_file_still(found: Found) -> bool:
    return bool(found.bare) and (found.folder / found.bare).exists()


def _needs(model: Model) -> Names[str]:
    described = model.described
    return described.config.needs if described is not None else ()


def load_spec_of(parameters: Mapping[str, str | bytes | int | bool]) -> LoadSpec:
    """Parse the parameters of a load request. Raises `Refused` with Triton's texts."""
    spec = LoadSpec()
    for name, value in parameters.items():
        if name.startswith(FILE):
            if not isinstance(value, bytes):
                text = f"File parameter '{name}' must have bytes type for its value"
                raise Refused(Kind.INVALID_ARGUMENT, text)
            spec.files = {**(spec.files or {}), name: value}
        elif name == VERSION:
            spec.number = _version(value)
        elif name == "config" and isinstance(value, str):
            spec.override = value
        elif name == "config":
            text = "Config parameter 'config' must have string type for its value"
            raise Refused(Kind.INVALID_ARGUMENT, text)
        else:
            kind = {bool: "BOOL", int: "INT", str: "STRING", bytes: "BYTES"}.get(type(value), "UNKNOWN")
            raise Refused(Kind.INVALID_ARGUMENT, f"Unrecognized load parameter '{name}' with type '{kind}'")
    if spec.files and spec.override is None:
        text = "Load parameter 'config' must be specified for model file override"
        raise Refused(Kind.INVALID_ARGUMENT, text)
    if spec.number != LATEST and spec.override is not None:
        text = f"Load parameter '{VERSION}' cannot be combined with others, which apply to all versions"
        raise Refused(Kind.INVALID_ARGUMENT, text)
    return spec


def _version(value: str | bytes | int | bool) -> int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= VERSION_DIGITS_MAX:
        return int(value)
    raise Refused(Kind.INVALID_ARGUMENT, f"Load parameter '{VERSION}' must be a version number")


async def _closed(model: Model) -> None:
    async with model.lock:
        await model.unload()
