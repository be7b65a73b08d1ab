"""One version of one model: its life cycle, its processes, and its requests in flight."""

import asyncio
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.ensemble import Dag, check, lacks
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.engines.tensor.measures import Ledger
from forebay.modelserver.models.context import ServerContext, Source
from forebay.modelserver.models.life.memory import BACK_IN_S, LoadCancelled, guessed_bytes, used_bytes
from forebay.modelserver.models.life.placing import as_one, child_spec, resize
from forebay.modelserver.models.life.states import KIND_TEXT, UNLOADED, Event, State, after, not_ready
from forebay.modelserver.models.life.warmup import warm_up
from forebay.modelserver.models.running.batch_scheduler import BatchScheduler
from forebay.modelserver.models.running.bls import nested
from forebay.modelserver.models.running.caching import VersionCache
from forebay.modelserver.models.running.call import Call, Scheduler
from forebay.modelserver.models.running.counting import Counts
from forebay.modelserver.models.running.ensemble import Ensemble
from forebay.modelserver.models.running.execution import Executor
from forebay.modelserver.models.running.inputs import Contract, prefix
from forebay.modelserver.models.running.rate_limiting import InstanceResources
from forebay.modelserver.models.running.sequence_scheduler import SequenceScheduler
from forebay.modelserver.models.running.wake_queue import WakeQueue
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import GaveUp
from forebay.modelserver.repository import ADOPTED, Described, complete

PINNED: Final = "forebay.pinned"
"""Model parameter: `true` keeps the model from sleeping."""


class Version:
    """One load of a version. Once it has ended, only its state and reason are meaningful."""

    def __init__(self, context: ServerContext, described: Described, number: int) -> None:
        self._context = context
        self.described = described
        self.number = number
        self.name = described.config.name
        self.text = str(number)
        self.state = State.UNAVAILABLE
        self.reason = ""
        self.counts = Counts(self.name, self.text)
        self.ledger = Ledger()
        """Custom metrics of the model."""
        self.inflight = 0
        """Requests without a final response."""
        self.held_bytes = 0
        context.loads += 1
        self._load = context.loads
        self._log = context.log.bind(model=self.name, version=self.text)
        self._contract: Contract | None = None
        self._runner: Scheduler | None = None
        self._answers: VersionCache | None = None
        self._size_bytes = 0
        """Last measured memory of its processes."""
        self._weighed = False
        """Whether `_size_bytes` comes from a load rather than an estimate."""
        self._process: ModelProcess | None = None
        self._resources: InstanceResources | None = None
        self._held = False
        """No new batches start, because others wait for its memory."""
        self._still = False
        """Held, and no batch is running."""
        self._given_up = False
        self._gone = asyncio.Event()
        self._quiet = asyncio.Event()

    @property
    def config(self) -> ModelConfig:
        """The configuration, completed as far as the model was loaded."""
        return self.described.config

    @property
    def document(self) -> Mapping[str, Any]:
        """The configuration document that clients see."""
        return self.described.document

    @property
    def healthy(self) -> bool:
        """Whether it is ready, and sleeps or has at least one instance that is up."""
        process = self._process
        if process is None or self.dormant or not process.instances:  # dormant: they are being stopped or started
            return self.state is State.READY
        return self.state is State.READY and any(map(process.alive, range(process.instances)))

    @property
    def key(self) -> str:
        """Unique name of this load of the version."""
        return f"{self.name}:{self.text}#{self._load}"

    @property
    def pinned(self) -> bool:
        """Whether it must not sleep: pinned by the operator or its configuration, or it holds sequence state."""
        config = self.config
        return self.name in self._context.options.pinned or config.says(PINNED) or config.sequences is not None

    @property
    def busy(self) -> bool:
        """Whether it has requests, unless it is held and none of them runs."""
        return self.inflight > 0 and not self._still

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of its instances."""
        return self._process.pids if self._process is not None else ()

    @property
    def process(self) -> ModelProcess | None:
        """The processes that run it; None if there are none, or it is an ensemble."""
        return self._process

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._runner.waiting if self._runner is not None else 0

    async def load(self) -> None:
        """Start the processes; the caller publishes the version. Raises `Refused`, leaving nothing behind."""
        self._move(Event.LOAD)
        began = monotonic()
        failed: BaseException | None = None
        try:
            lacking = lacks(self.config, self._context.models.lookup)
            if lacking:
                raise Refused(Kind.INVALID_ARGUMENT, "; ".join(lacking))
            if self.config.in_process:
                self.described = as_one(self.described, self._context.models.lookup)
            if self.config.backend == "ensemble" and not self.config.in_process:
                self._runner = self._ensemble()
            else:
                self._runner = await self._start()
            self._contract = Contract(self.config, self._context.options.strings_max)
        except BaseException as error:  # handled below: see `modelserver.waiting`
            failed = error
        if failed is not None:
            await self._end(None)
            text = failed.text if isinstance(failed, Refused) else "the load was cancelled"
            kind = failed.kind if isinstance(failed, Refused) else Kind.UNAVAILABLE
            self._move(Event.FAILED, f"{KIND_TEXT[kind]}: {text}")
            raise failed
        self.invalidate_cache()
        self.counts.statistics.load_s = monotonic() - began
        self._move(Event.LOADED)

    def invalidate_cache(self) -> None:
        """Invalidate the cached responses: a dependency has changed."""
        config, cache = self.config, self._context.cache
        if cache is not None and config.cache and config.sequences is None and not config.decoupled:
            self._context.loads += 1
            self._answers = VersionCache(cache, self.name, self.text, self._context.loads, self.counts)

    def submit(self, request: InferRequest, on_response: OnResponse) -> Call:
        """Validate and queue a request. Raises `Refused`."""
        runner, contract = self._runner, self._contract
        if runner is None or contract is None or self.state is not State.READY:
            raise Refused(Kind.UNAVAILABLE, f"Request for unknown model: {not_ready(self.name, self.text)}")
        checked = contract.check(request)
        size = checked.size_bytes
        options = self._context.options
        if self.inflight >= options.queue_max or (self.inflight and self.held_bytes + size > options.held_bytes_max):
            raise Refused(Kind.UNAVAILABLE, f"{prefix(request.id)}Exceeds maximum queue size")
        call = Call(request, checked, on_response)
        call.runner = runner
        answers = self._answers
        if answers is not None:
            known = answers.find(call)
            if known is not None:
                asyncio.get_running_loop().call_soon(call.respond, known, True)
                return call
            call.on_answer = partial(self._keep_answer, answers, call)
        call.size_bytes = size
        call.on_end = self._ended
        if not self.inflight and not self._still:
            self._context.memory.enter(self)
        self.inflight += 1
        self.held_bytes += size
        try:
            runner.submit(call)
        except Refused:
            call.end()
            raise
        return call

    def measure(self) -> "list[asyncio.Future[None]]":
        """Ask the instances for custom metrics; await the futures until the ledger has them."""
        return self._process.measure() if self._process is not None else []

    def give_up(self) -> None:
        """Abort a load in progress."""
        self._given_up = True
        if self.state is State.LOADING:
            self._context.memory.withdraw(self)
            if self._process is not None:
                self._process.stop()

    async def unload(self, reason: str = UNLOADED) -> None:
        """Reject new requests, drain those in flight within `drain_s`, and stop the processes."""
        self._move(Event.UNLOAD)
        self.resume()
        if self.inflight and not self._context.drained:
            self._quiet.clear()
            try:
                async with asyncio.timeout(self._context.options.drain_s):
                    await self._quiet.wait()
            except TimeoutError:
                self._log.warning("drain timed out: unloading with requests in flight", requests=self.inflight)
        self._given_up = True  # until now, requests that wait for memory may wake it
        self._context.memory.withdraw(self)
        await self._end(Refused(Kind.UNAVAILABLE, f"model '{self.name}' version {self.text} has been unloaded"))
        self._move(Event.GONE, reason)

    def dismiss(self) -> None:
        """Clear a failure, so that it does not affect server readiness."""
        if self.state is State.UNAVAILABLE:
            self.reason = UNLOADED

    async def adopt(self, described: Described) -> None:
        """Apply a configuration that differs only in `ADOPTED` while requests go on. Raises `Refused`."""
        process, runner, instances = self._process, self._runner, described.config.instances
        scales = process is not None and instances != self.config.instances
        if self._context.rate_limiter is not None and instances != self.config.instances:
            self._context.rate_limiter.check(instances, self._resources.keys if self._resources is not None else ())
        fewer = process is not None and described.config.instance_count <= process.instances
        leaving = scales and fewer and isinstance(runner, SequenceScheduler)
        if process is not None and scales and not leaving:
            try:
                await resize(process, self.described, described.config, self._context.options)
            except GaveUp as gave_up:
                if not self.dormant:  # else it was put to sleep meanwhile, and wakes with the new instances
                    raise Refused(Kind.INTERNAL, str(gave_up)) from None
        document = {**self.document, **{name: described.document[name] for name in ADOPTED}}
        config = replace(self.config, instances=instances, versions=described.config.versions)
        self.described = replace(self.described, config=config, document=document)
        if process is not None and leaving and isinstance(runner, SequenceScheduler):
            runner.retire(config.instance_count)
            self._context.tasks.create_task(self._shrink(process, runner))
        elif process is not None and scales:
            await self._resized(process)

    async def _shrink(self, process: ModelProcess, runner: SequenceScheduler) -> None:
        """Remove the instances that are too many once their sequences have ended, which may be long after."""
        await runner.left()
        await process.resized()
        if process.instances <= self.config.instance_count:
            return  # they are wanted again
        try:
            await resize(process, self.described, self.config, self._context.options)
            await self._resized(process)
        except GaveUp:  # it has been stopped meanwhile
            return
        except Refused as refused:  # another model has come that needs the resources in another way
            self._log.error("instances keep their resources", reason=refused.text)

    async def _resized(self, process: ModelProcess) -> None:
        if self._runner is not None and self._resources is not None:
            self._resources.set(self.config.instances)
            self._runner.set_instances(process.instances)
            if self._context.options.memory_bytes:
                self._context.memory.resize(self, await self.measured())

    def hold(self) -> None:
        """Start no new batches: others wait for its memory, and it is idle once the running ones end."""
        if self.state is State.READY and isinstance(self._runner, BatchScheduler):
            self._held = True
            self._runner.hold()
            self._look_still()

    def resume(self) -> None:
        """Undo `hold`."""
        if self._held and isinstance(self._runner, BatchScheduler):
            self._runner.resume()
            if self._still and self.inflight:
                self._context.memory.enter(self)
        self._held = self._still = False

    def _look_still(self) -> None:
        if self._held and not self._still and self.inflight == self.waiting:
            self._still = True
            if self.inflight:
                self._context.memory.leave(self)

    def sleep(self) -> Awaitable[None]:
        """Stop its processes until a request wakes it: others need the memory. Only while it is not busy."""
        assert not self.busy
        runner = self._runner
        if self.state is State.READY and isinstance(runner, BatchScheduler):  # else it is ending already
            self._log.info("model sleeps", size_bytes=self._size_bytes, requests=self.inflight)
            self._held = self._still = False
            queue = WakeQueue(self.config, self.counts, self._awaken, partial(self._context.memory.withdraw, self))
            self._runner = queue
            queue.take(runner.take_all())
        return self._end(None)

    @property
    def dormant(self) -> bool:
        """Whether it sleeps and a request would wake it."""
        return self.state is State.READY and isinstance(self._runner, WakeQueue)

    @property
    def size_bytes(self) -> int:
        """Last measured memory of its processes."""
        return self._size_bytes

    def wake(self) -> None:
        """Load a sleeping version again before a request needs it."""
        if isinstance(self._runner, WakeQueue):
            self._runner.awaken()

    def _awaken(self) -> None:
        self._context.tasks.create_task(self._wake())

    async def _wake(self) -> None:
        """Load a sleeping version again, for its waiting requests."""
        queue = self._runner
        assert isinstance(queue, WakeQueue)
        try:
            runner = await self._start()
        except Refused as refused:  # handled below: see `modelserver.waiting`
            failed = refused
        else:
            self._runner = runner
            self._context.memory.wakes += 1
            queue.hand_over(runner)
            return
        await self._end(None)
        if isinstance(failed, LoadCancelled):
            queue.on_load_cancelled()
            return
        if failed.kind is not Kind.UNAVAILABLE and self.state is State.READY:
            self._log.error("model cannot be loaded again", reason=failed.text)
            if queue.on_load_failed():
                self._move(Event.FAILED, f"{KIND_TEXT[failed.kind]}: {failed.text}")
            text = f"model '{self.name}' version {self.text} cannot be loaded again: {failed.text}"
            failed = Refused(failed.kind, text, BACK_IN_S)
        queue.close(Refused(Kind.UNAVAILABLE, failed.text, failed.retry_after_s))

    def _ensemble(self) -> Ensemble:
        config = self.config
        found = check(config, self._context.models.lookup)
        if found.many and not config.decoupled:
            document = {**self.document, "model_transaction_policy": {"decoupled": True}}
            self.described = replace(self.described, config=replace(config, decoupled=True), document=document)
        dag = Dag(config, found.decoupled)
        return Ensemble(self.config, self.text, dag, self.counts, self._context.models)

    async def _start(self) -> Scheduler:
        """Start the processes and build the scheduler. Raises `Refused`; the caller then calls `_end`."""
        context = self._context
        process = await self._begin()
        if not await self._settled():
            await self._end(None)  # hold no memory while waiting for more, or two loads could deadlock
            process = await self._begin()
            await self._settled()
        context.memory.loaded(self)
        if self._gone.is_set():  # they have failed for good since they were ready
            raise Refused(Kind.INTERNAL, process.reason)
        config = self.config
        resources = self._resources = InstanceResources(context.rate_limiter, self._changed)
        resources.set(config.instances)
        executor = Executor(config, self.text, self.counts, process, resources)
        if config.sequences is not None:
            return SequenceScheduler(config, self.described.folder, executor, process.instances)
        return BatchScheduler(config, executor, process.instances)

    async def _begin(self) -> ModelProcess:
        """Start processes once there is room for them, and wait until they are ready. Raises `Refused`."""
        context, options = self._context, self._context.options
        await self._reserve_memory()
        if self._given_up or self.state is State.UNAVAILABLE:
            raise Refused(Kind.UNAVAILABLE, not_ready(self.name, self.text))
        self._gone.clear()
        process = self._process = ModelProcess(
            child_spec(Source(self.config, self.folder, self.document), options, context.models),
            hang_s=options.hang_s,
            load_timeout_s=options.load_timeout_s,
            log=self._log,
            on_call=partial(nested, context),
            on_change=self._changed,
            ledger=self.ledger,
        )
        context.tasks.create_task(self._keep(process))
        try:
            loaded = await process.wait_ready()
        except GaveUp as gave_up:
            raise Refused(Kind.INTERNAL, str(gave_up)) from None
        self.described = complete(self.described, loaded, options.rules)
        if loaded.omitted and self.state is State.LOADING:
            self._log.warning("outputs of the model cannot be served", omitted=loaded.omitted)
        await warm_up(self.config, self.described.folder, options.strings_max, process.senders)
        return process

    async def _reserve_memory(self) -> None:
        """Wait for memory. Raises `Refused`."""
        memory, options = self._context.memory, self._context.options
        if self.state is State.LOADING:
            wait_s = options.load_timeout_s
        else:
            wait_s = options.room_wait_s if self.waiting else 0.0
        size_bytes = 0
        if self._weighed:  # it may have grown beyond the budget, but it was loaded with less
            size_bytes = min(self._size_bytes, memory.most_bytes(self))
        elif options.memory_bytes:
            bare = self.folder == self.described.folder
            size_bytes = guessed_bytes(self.folder, f"{Path(self.config.model_file).stem}." if bare else "")
        await memory.admit(self, size_bytes, wait_s)

    async def _settled(self) -> bool:
        """Whether the measured size of its processes fits. Raises `Refused` if it never can.

        If the size was known before, slightly more is no reason to wait for others and load it again.
        """
        if not self._context.options.memory_bytes:
            return True
        known, self._weighed = self._weighed, True
        return await self._context.memory.settle(self, await self.measured(), anyway=known)

    async def measured(self) -> int:
        """Memory that its processes take now."""
        pids = tuple(self.pids)
        size_bytes = await asyncio.to_thread(used_bytes, pids)
        if size_bytes and pids == tuple(self.pids):
            self._size_bytes = size_bytes
        return self._size_bytes

    @property
    def folder(self) -> Path:
        """Folder of the version."""
        return self.described.versions[self.number]

    async def _keep(self, process: ModelProcess) -> None:
        """Supervise the processes until they end."""
        why = ""
        try:
            await process.run()
        except GaveUp as gave_up:
            why = str(gave_up)
        except Exception as error:  # supervisor: a bug in one model's process handling must not take the others down
            self._log.error("model process failed", trace=traceback.format_exc())
            why = f"{type(error).__name__}: {error}"
        finally:
            self._gone.set()
        refused = Refused(Kind.UNAVAILABLE, f"model '{self.name}' version {self.text} is not available: {why}")
        if why and self.state is State.UNLOADING:
            self._close(refused)  # nothing will run what is queued
        elif why and self.state is State.READY and not self.dormant:  # else a load reports it
            self._move(Event.FAILED, f"{KIND_TEXT[Kind.INTERNAL]}: {why}")
            await self._end(refused)

    async def _end(self, refused: Refused | None) -> None:
        """Stop the processes; with an error, fail all queued requests first."""
        process = self._process
        if refused is not None:
            self._close(refused)
        if process is not None:
            process.stop()
            await self._gone.wait()
            self._process = None
        if self._resources is not None:
            self._resources.close()
            self._resources = None
        self._context.memory.remove(self)

    def _close(self, refused: Refused) -> None:
        if self._runner is not None:
            self._runner.close(refused)

    def _changed(self) -> None:
        if self._runner is not None:
            self._runner.wake()
        self._look_still()  # requests that a lost process had not started are queued again

    def _ended(self, call: Call) -> None:
        self.inflight -= 1
        self.held_bytes -= call.size_bytes
        if not self.inflight:
            if not self._still:
                self._context.memory.leave(self)
            self._quiet.set()
        self._look_still()

    def _keep_answer(self, answers: VersionCache, call: Call, response: InferResponse) -> None:
        if response.error is None:
            answers.keep(call, response)

    def _move(self, event: Event, reason: str = "") -> None:
        self.state = after(self.state, event)
        self.reason = reason
        self._context.moves += 1
        self._log.info("model " + event, state=self.state, reason=reason)
