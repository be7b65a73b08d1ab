"""The model server behind its fronts: implements `ports.Models` on real repositories and processes."""

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Final, NamedTuple

import structlog

from forebay.core.serving.cache import ByteLru
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.statistics import ModelStatistics
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.engines.tensor.measures import SERIES_MAX, Family, merged
from forebay.modelserver.models.context import ServerContext, Source
from forebay.modelserver.models.life.collection import Collection
from forebay.modelserver.models.life.memory import MemoryManager, MemoryUse
from forebay.modelserver.models.life.model import LATEST
from forebay.modelserver.models.life.version import Version
from forebay.modelserver.models.options import Control, Options
from forebay.modelserver.models.running.caching import Cache
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.models.running.rate_limiting import RateLimiter
from forebay.modelserver.ports import IndexEntry, ModelView
from forebay.modelserver.repository import BadModel
from forebay.modelserver.strays import Guard
from forebay.modelserver.waiting import and_finally, in_group

MEASURE_S: Final = 0.5
"""Time limit for custom metrics in a scrape: a model may hang."""


Measured = Callable[[str, str, Call, int, int], None]
"""Called with model, version and request, and the times of its first response and its end (CLOCK_MONOTONIC, ns)."""


class Processes(NamedTuple):
    """The processes of all served models."""

    pids: Sequence[int]
    replaced: int
    """Number of unexpected exits."""
    stalled_s: float
    """The longest time that any model has had only processes that do not answer a ping."""


class ModelServer:
    """Run `run()` as a task that owns all processes, await `started()`, and call `stop()` at the end.

    All other methods are called on the loop of `run`.
    """

    def __init__(self, options: Options, log: structlog.stdlib.BoundLogger) -> None:
        self._options = options
        self._log = log
        self._models: Collection | None = None
        self._memory: MemoryManager | None = None
        self.cache: Cache | None = ByteLru(options.cache_bytes) if options.cache_bytes else None
        """The response cache; None: there is none."""
        self.measured: Measured | None = None
        """Called when a request of one model to another has been answered."""
        self._keeping: asyncio.Task[None] | None = None
        self._problems: list[str] = []
        self._started = asyncio.Event()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Load the models, and keep them running until `stop`; then stop every process.

        Raises `FileNotFoundError` or `NotADirectoryError` for a repository that does not exist.
        """
        guard: Guard | None = None
        try:
            guard = Guard()
        except OSError as error:
            self._log.warning("what models start would survive if this server were killed", reason=str(error))
        try:
            await in_group(self._run)
        finally:  # all processes have ended, even if this is cancelled
            if guard is not None:
                guard.close()

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        options = self._options
        memory = self._memory = MemoryManager(options.memory_bytes, options.turn_s, tasks)
        context = ServerContext(
            options,
            self._log,
            tasks,
            _InternalAccess(self),
            memory,
            self.cache,
            RateLimiter(options.amounts) if options.limited else None,
        )
        models = self._models = Collection(context)
        if options.memory_bytes:
            self._keeping = tasks.create_task(memory.keep(options.measure_s))
        await and_finally(self._serve(models), self._close)

    async def _close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        if self._keeping is not None:
            self._keeping.cancel()
        if self._models is not None:
            await self._models.close()

    async def _serve(self, models: Collection) -> None:
        self._problems = await models.start()
        self._started.set()
        await self._watch(models)

    def stop(self, *, drained: bool = False) -> None:
        """Make `run` unload everything and return. `drained`: running requests have had their time, and fail."""
        self._stopping.set()
        if self._models is not None:
            self._models.give_up(drained=drained)

    def abort_loads(self) -> None:
        """Abort all loads in progress and reject new ones: the server is about to stop."""
        if self._models is not None:
            self._models.give_up()

    async def started(self) -> Sequence[str]:
        """Wait until startup is over; returns the error texts of models that could not be loaded."""
        await self._started.wait()
        return self._problems

    @property
    def live(self) -> bool:
        """Whether the server is not being stopped."""
        return not self._stopping.is_set()

    @property
    def ready(self) -> bool:
        """Whether the server and every model that should be served are ready."""
        if not self._started.is_set() or self._stopping.is_set() or self._models is None:
            return False
        return self._models.all_ready or not self._options.strict_readiness

    def view(self, name: str, version: str) -> ModelView:
        """The version of a model that serves requests for `version` (empty: the latest). Raises `Refused`."""
        number = number_of(version) if version else LATEST
        return self._collection.model(name).view(number)

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        """Class labels of an output; those of an ensemble come from the step that produces the output."""
        found = self._find(name, version)
        own = found.described.labels.get(output, ())
        if own:
            return own
        for step in found.config.steps:
            for made, tensor in step.outputs.items():
                if tensor == output:
                    return self.labels(step.model, "" if step.version == LATEST else str(step.version), made)
        return ()

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """Statistics of a version, of all if `version` is empty, or of all models if `name` is. Raises `Refused`."""
        served = self._collection.served
        if name:
            number = number_of(version)
            served = [each for each in served if each.name == name]
            if not served:
                raise Refused(Kind.INVALID_ARGUMENT, f"requested model '{name}' is not available")
            if number != LATEST:
                served = [each for each in served if each.number == number]
            if not served:
                text = f"requested model version is not available for model '{name}'"
                raise Refused(Kind.INVALID_ARGUMENT, text)
        for each in served:
            each.counts.statistics.pending = each.waiting
        return [each.counts.statistics for each in served]

    def processes(self) -> Processes:
        """State of the processes of all models. Raises `Refused`."""
        now = asyncio.get_running_loop().time()
        found = [each.process for each in self._collection.served if each.process is not None]
        return Processes(
            [pid for each in found for pid in each.pids],
            sum(each.replaced for each in found),
            max((each.stalled_s(now) for each in found), default=0.0),
        )

    def memory(self) -> MemoryUse | None:
        """Use of the memory budget; None: there is no budget."""
        if self._memory is None or self._models is None or not self._options.memory_bytes:
            return None
        return self._memory.use(sum(each.dormant for each in self._models.served))

    async def measure(self) -> Sequence[Family]:
        """Custom metrics of the models; of a process that does not answer in time, the last known values."""
        if self._models is None:
            return ()
        served = self._models.served
        asked = [future for each in served for future in each.measure()]
        if asked:
            await asyncio.wait(asked, timeout=MEASURE_S)
        families = [family for each in served for family in each.ledger.families()]
        return merged(families, series_max=SERIES_MAX * len(served))

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """The repository index."""
        return self._collection.index(ready_only)

    async def refresh(self) -> None:
        """Scan the repositories for the index, unless that was done just now."""
        await self._collection.refresh()

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Load or reload a model; `config` and `file:<version>/<name>` override the repository's files."""
        await self._collection.load(name, parameters)

    async def unload(self, name: str, dependents: bool, version: str = "") -> None:
        """Unload a model, or one version (our extension); `dependents`: also models that only its ensemble needed."""
        await self._collection.unload(name, dependents, number_of(version))

    def infer(self, request: InferRequest, on_response: OnResponse) -> Call:
        """Validate and queue a request. Responses come to `on_response`, never before this returns."""
        return self._find(request.model, request.version).submit(request, on_response)

    def dropped(self, request: InferRequest) -> None:
        """Count a request that was displaced by a newer one before it was queued."""
        with suppress(Refused):  # the model is gone, and its counts with it
            self._find(request.model, request.version).counts.drop(request)

    def lookup(self, name: str, version: int) -> ModelConfig | None:
        """The configuration of a ready version (-1: the latest), or None."""
        return self._collection.lookup(name, version)

    @property
    def _collection(self) -> Collection:
        if self._models is None:
            raise Refused(Kind.UNAVAILABLE, "Server not ready")
        return self._models

    def _find(self, name: str, version: str) -> Version:
        return self._collection.find(name, number_of(version) if version else LATEST)

    async def _watch(self, models: Collection) -> None:
        """Wait for `stop`; polls the repositories if configured."""
        if self._options.control is not Control.POLL:
            await self._stopping.wait()
            return
        while not self._stopping.is_set():
            began = monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await self._stopping.wait()
            if not self._stopping.is_set():
                try:
                    await models.poll()
                except (OSError, BadModel) as error:  # the repository may be back, or in order, next time
                    self._log.error("repository cannot be read", reason=str(error), after_s=monotonic() - began)
                except Exception:  # supervisor: a poll that fails must not end what is served
                    self._log.error("repository could not be polled", trace=traceback.format_exc())


class _InternalAccess:
    """The models as ensembles and calls of models reach them. Implements `ModelAccess`."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def infer(self, request: InferRequest, on_response: OnResponse) -> Call:
        """Send a request to another model. Raises `Refused`."""
        measured = self._server.measured
        if measured is None or request.came_ns:  # a client's request that starts again is measured as such
            return self._server.infer(request, on_response)
        inner = _InternalRequest(measured, request, on_response)
        call = self._server.infer(request, inner.on_response)
        inner.begun(call)
        return call

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Load or reload a model. Raises `Refused`."""
        await self._server._collection.load(name, parameters, nested=True)

    async def unload(self, name: str, dependents: bool) -> None:
        """Unload a model. Raises `Refused`."""
        await self._server.unload(name, dependents)

    def lookup(self, name: str, version: int) -> ModelConfig | None:
        """The configuration of a ready version (-1: the latest), or None."""
        return self._server.lookup(name, version)

    def source(self, name: str, version: int) -> Source:
        """What a process needs to load a ready version (-1: the latest) again. Raises `Refused`."""
        found = self._server._collection.find(name, version)
        return Source(found.config, found.folder, found.document)


class _InternalRequest:
    """A request of one model to another whose latency is measured, as that of clients' requests is."""

    __slots__ = ("_call", "_first_ns", "_measured", "_model", "_on_response", "_version")

    def __init__(self, measured: Measured, request: InferRequest, on_response: OnResponse) -> None:
        self._measured = measured
        self._model = request.model
        self._version = request.version
        self._on_response: OnResponse | None = on_response
        self._first_ns = 0
        self._call: Call | None = None

    def begun(self, call: Call) -> None:
        """Measure `call`, unless it has been answered already, as from the cache."""
        if self._on_response is not None:
            self._call = call

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Deliver a response; the last one is measured unless it is an error."""
        on_response, call = self._on_response, self._call
        if on_response is None:
            return
        end_ns = monotonic_ns()
        failed = False
        if response is not None:
            failed = response.error is not None
            self._first_ns = self._first_ns or end_ns
            self._version = response.version or self._version
        if final:
            self._on_response = self._call = None  # break the cycle, so that responses are freed at once
        on_response(response, final)
        if final and call is not None and not failed:
            self._measured(self._model, self._version, call, self._first_ns or end_ns, end_ns)


def number_of(version: str) -> int:
    """Parse a version number; empty: the latest (-1). Raises `Refused` with Triton's texts."""
    if not version:
        return LATEST
    try:
        number = int(version)
    except ValueError:
        text = (
            f"failed to get model version from specified version string '{version}' (details: stoll), version should "
            "be an integral value > 0"
        )
        raise Refused(Kind.INVALID_ARGUMENT, text) from None
    if number < 0:
        text = (
            f"failed to get model version from specified version string '{version}', version should be an integral "
            "value > 0"
        )
        raise Refused(Kind.INVALID_ARGUMENT, text)
    return number
