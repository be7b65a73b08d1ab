"""One version of one model: its life, its processes, and the requests that are under way in it."""

import asyncio
import json
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.ensemble import Dag, check, lacks
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.engines.tensor.measures import Ledger
from forebay.modelserver.models.life.placing import placements
from forebay.modelserver.models.life.room import Withdrawn, guessed_bytes, used_bytes
from forebay.modelserver.models.life.states import KIND_TEXT, UNLOADED, Event, State, after
from forebay.modelserver.models.life.warmup import warm_up
from forebay.modelserver.models.running.bls import nested
from forebay.modelserver.models.running.caching import Answers
from forebay.modelserver.models.running.call import Call, Runner
from forebay.modelserver.models.running.counting import Counts
from forebay.modelserver.models.running.ensemble import Ensemble
from forebay.modelserver.models.running.execution import Executor
from forebay.modelserver.models.running.inputs import Contract, prefix, size_bytes
from forebay.modelserver.models.running.parking import Parking
from forebay.modelserver.models.running.queued import Queued
from forebay.modelserver.models.running.seats import Seats
from forebay.modelserver.models.running.sequenced import Sequenced
from forebay.modelserver.models.site import Site
from forebay.modelserver.process.placement import ChildSpec
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import GaveUp
from forebay.modelserver.repository import Described, complete

PINNED: Final = "forebay.pinned"
"""A parameter of a model: `true` keeps it from sleeping."""


class Scheduler(Runner, Protocol):
    """A runner with a queue and instances."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""

    def set_instances(self, instances: int) -> None:
        """There are that many now."""

    def wake(self) -> None:
        """Something has changed: look soon what can start."""

    def close(self, refused: Refused) -> None:
        """Nothing runs any more: all that wait end with this error."""


class Version:
    """Made when it is to be loaded; after its end only its state and reason are of use."""

    def __init__(self, site: Site, described: Described, number: int) -> None:
        self._site = site
        self.described = described
        self.number = number
        self.name = described.config.name
        self.text = str(number)
        self.state = State.UNAVAILABLE
        self.reason = ""
        self.counts = Counts(self.name, self.text)
        self.ledger = Ledger()
        """What the model counts of its own."""
        self.inflight = 0
        """Requests that have no (last) answer yet."""
        self.held_bytes = 0
        site.loads += 1
        self._load = site.loads
        self._log = site.log.bind(model=self.name, version=self.text)
        self._contract: Contract | None = None
        self._runner: Scheduler | None = None
        self._answers: Answers | None = None
        self._size_bytes = 0
        """What its processes have taken when that was last measured."""
        self._weighed = False
        """Whether that is known from a load."""
        self._process: ModelProcess | None = None
        self._seats: Seats | None = None
        self._held = False
        """It begins nothing new, because others wait for its memory."""
        self._still = False
        """Besides, nothing runs."""
        self._given_up = False
        self._gone = asyncio.Event()
        self._quiet = asyncio.Event()

    @property
    def config(self) -> ModelConfig:
        """What it is, as far as is known."""
        return self.described.config

    @property
    def document(self) -> Mapping[str, Any]:
        """The configuration as clients see it."""
        return self.described.document

    @property
    def healthy(self) -> bool:
        """Whether requests are answered now: ready, and not all of its processes being replaced."""
        process = self._process
        return self.state is State.READY and (
            process is None or not process.instances or any(map(process.alive, range(process.instances)))
        )

    @property
    def key(self) -> str:
        """A name that no other load of any version has."""
        return f"{self.name}:{self.text}#{self._load}"

    @property
    def pinned(self) -> bool:
        """It must not sleep: the operator says so, or it knows of sequences."""
        config = self.config
        return self.name in self._site.options.pinned or config.says(PINNED) or config.sequences is not None

    @property
    def busy(self) -> bool:
        """Whether it has requests, and works on them."""
        return self.inflight > 0 and not self._still

    @property
    def pids(self) -> Sequence[int]:
        """Its processes."""
        return self._process.pids if self._process is not None else ()

    @property
    def process(self) -> ModelProcess | None:
        """What runs it; None: nothing yet, or nothing any more, or it is an ensemble."""
        return self._process

    @property
    def waiting(self) -> int:
        """Requests that wait for an instance."""
        return self._runner.waiting if self._runner is not None else 0

    async def load(self) -> None:
        """Start its processes and make it ready, but for being found. Raises `Refused`; nothing is left then."""
        self._move(Event.LOAD)
        began = monotonic()
        failed: BaseException | None = None
        try:
            lacking = lacks(self.config, self._site.others.lookup)
            if lacking:
                raise Refused(Kind.INVALID_ARGUMENT, "; ".join(lacking))
            if self.config.backend == "ensemble":
                self._runner = self._ensemble()
            else:
                self._runner = await self._start()
            self._contract = Contract(self.config, self._site.options.strings_max)
        except BaseException as error:  # handled below: see `modelserver.waiting`
            failed = error
        if failed is not None:
            await self._end(None)
            text = failed.text if isinstance(failed, Refused) else "the load was given up"
            kind = failed.kind if isinstance(failed, Refused) else Kind.UNAVAILABLE
            self._move(Event.FAILED, f"{KIND_TEXT[kind]}: {text}")
            raise failed
        self.forget_answers()
        self.counts.statistics.load_s = monotonic() - began
        self._move(Event.LOADED)

    def forget_answers(self) -> None:
        """Look for none in the cache that are there by now: what the model needs is another one."""
        config, cache = self.config, self._site.cache
        if cache is not None and config.cache and config.sequences is None and not config.decoupled:
            self._site.loads += 1
            self._answers = Answers(cache, self.name, self.text, self._site.loads, self.counts)

    def submit(self, request: InferRequest, on_response: OnResponse) -> Call:
        """Check and queue a request. Raises `Refused`."""
        runner, contract = self._runner, self._contract
        if runner is None or contract is None or self.state is not State.READY:
            raise Refused(Kind.UNAVAILABLE, f"Request for unknown model: {not_ready(self.name, self.text)}")
        checked = contract.check(request)
        size = 0
        for tensor in checked.inputs:
            size += size_bytes(tensor.data)
        options = self._site.options
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
            self._site.room.enter(self)
        self.inflight += 1
        self.held_bytes += size
        try:
            runner.submit(call)
        except Refused:
            call.end()
            raise
        return call

    def measure(self) -> "list[asyncio.Future[None]]":
        """Ask for what the model counts of its own; what is to be awaited until it is in the ledger."""
        return self._process.measure() if self._process is not None else []

    def give_up(self) -> None:
        """Let a load that is under way fail now, however long it would have taken."""
        self._given_up = True
        if self.state is State.LOADING:
            self._site.room.withdraw(self)
            if self._process is not None:
                self._process.stop()

    async def unload(self, reason: str = UNLOADED) -> None:
        """Take no more requests, finish those under way, bounded in time, and end the processes."""
        self._move(Event.UNLOAD)
        self.go_on()
        if self.inflight:
            self._quiet.clear()
            try:
                async with asyncio.timeout(self._site.options.drain_s):
                    await self._quiet.wait()
            except TimeoutError:
                self._log.warning("unloading with requests under way", requests=self.inflight)
        self._site.room.withdraw(self)
        await self._end(Refused(Kind.UNAVAILABLE, f"model '{self.name}' version {self.text} has been unloaded"))
        self._move(Event.GONE, reason)

    def dismiss(self) -> None:
        """It has failed, but nobody wants it any more: the server may be ready without it."""
        if self.state is State.UNAVAILABLE:
            self.reason = UNLOADED

    async def adopt(self, described: Described) -> None:
        """Take over a configuration that differs only in its instances, while requests go on. Raises `Refused`."""
        self.described = replace(self.described, labels=described.labels)
        instances = described.config.instances
        if instances == self.config.instances:
            return
        process = self._process
        if process is not None:
            try:
                await process.set_instances(placements(described.config, self._site.options))
            except GaveUp as gave_up:
                raise Refused(Kind.INTERNAL, str(gave_up)) from None
        document = {**self.document, "instance_group": described.document.get("instance_group", [])}
        self.described = replace(self.described, config=replace(self.config, instances=instances), document=document)
        if process is not None and self._runner is not None and self._seats is not None:
            self._seats.set(instances)
            self._runner.set_instances(process.instances)
            if self._site.options.memory_bytes:
                self._site.room.resize(self, await self.measured())

    def hold(self) -> None:
        """Begin nothing new: others wait for its memory, and it is not busy once what runs has ended."""
        if self.state is State.READY and isinstance(self._runner, Queued):
            self._held = True
            self._runner.hold()
            self._look_still()

    def go_on(self) -> None:
        """Nobody waits for its memory any more."""
        if self._held and isinstance(self._runner, Queued):
            self._runner.go_on()
            if self._still and self.inflight:
                self._site.room.enter(self)
        self._held = self._still = False

    def _look_still(self) -> None:
        if self._held and not self._still and self.inflight == self.waiting:
            self._still = True
            if self.inflight:
                self._site.room.leave(self)

    def sleep(self) -> Awaitable[None]:
        """End its processes until it is woken for a request: others need the memory. Only while it is not busy."""
        assert not self.busy
        runner = self._runner
        if self.state is State.READY and isinstance(runner, Queued):  # else it is ending anyway
            self._log.info("model sleeps", size_bytes=self._size_bytes, requests=self.inflight)
            self._held = self._still = False
            parking = Parking(self.config, self.counts, self._awaken, partial(self._site.room.withdraw, self))
            self._runner = parking
            parking.take(runner.emptied())
        return self._end(None)

    @property
    def dormant(self) -> bool:
        """Whether it sleeps, and would be loaded for a request."""
        return self.state is State.READY and isinstance(self._runner, Parking)

    @property
    def size_bytes(self) -> int:
        """What its processes have taken when that was last measured."""
        return self._size_bytes

    def wake(self) -> None:
        """Load it again before a request asks for it."""
        if isinstance(self._runner, Parking):
            self._runner.awaken()

    def _awaken(self) -> None:
        self._site.tasks.create_task(self._wake())

    async def _wake(self) -> None:
        """Load it again, for the requests that wait."""
        parking = self._runner
        assert isinstance(parking, Parking)
        try:
            runner = await self._start()
        except Refused as refused:  # handled below: see `modelserver.waiting`
            failed = refused
        else:
            self._runner = runner
            self._site.room.wakes += 1
            parking.move(runner)
            return
        await self._end(None)
        if isinstance(failed, Withdrawn):
            parking.rest()
            return
        if failed.kind is not Kind.UNAVAILABLE and self.state is State.READY:
            self._move(Event.FAILED, f"{KIND_TEXT[failed.kind]}: {failed.text}")
        parking.close(Refused(Kind.UNAVAILABLE, failed.text, failed.retry_after_s))

    def _ensemble(self) -> Ensemble:
        config = self.config
        found = check(config, self._site.others.lookup)
        if found.many and not config.decoupled:
            document = {**self.document, "model_transaction_policy": {"decoupled": True}}
            self.described = replace(self.described, config=replace(config, decoupled=True), document=document)
        dag = Dag(config, found.decoupled)
        return Ensemble(self.config, self.text, dag, self.counts, self._site.others)

    async def _start(self) -> Scheduler:
        """Processes with everything around them. Raises `Refused`; `_end` is for the caller then."""
        site = self._site
        process = await self._begin()
        if not await self._settled():
            await self._end(None)  # who waits for memory holds none: so no two wait for each other
            process = await self._begin()
            await self._settled()
        site.room.loaded(self)
        config = self.config
        seats = self._seats = Seats(site.turns, self._changed)
        seats.set(config.instances)
        executor = Executor(config, self.text, self.counts, process, seats)
        if config.sequences is not None:
            return Sequenced(config, self.described.folder, executor, process.instances)
        return Queued(config, executor, process.instances)

    async def _begin(self) -> ModelProcess:
        """Processes that are ready, once there is room for them. Raises `Refused`."""
        site, options = self._site, self._site.options
        config = self.config
        await self._enter_room()
        if self._given_up or self.state not in (State.LOADING, State.READY):
            raise Refused(Kind.UNAVAILABLE, not_ready(self.name, self.text))
        self._gone.clear()
        process = self._process = ModelProcess(
            ChildSpec(
                config.backend,
                config,
                self.folder,
                placements(config, options),
                options.rss_bytes_max,
                json.dumps(self.document),
            ),
            hang_s=options.hang_s,
            load_timeout_s=options.load_timeout_s,
            log=self._log,
            on_call=partial(nested, site),
            on_change=self._changed,
            ledger=self.ledger,
        )
        site.tasks.create_task(self._keep(process))
        try:
            loaded = await process.wait_ready()
        except GaveUp as gave_up:
            raise Refused(Kind.INTERNAL, str(gave_up)) from None
        self.described = complete(self.described, loaded, options.rules)
        await warm_up(self.config, self.described.folder, process, options.strings_max)
        return process

    async def _enter_room(self) -> None:
        """Wait until there is memory. Raises `Refused`."""
        room, options = self._site.room, self._site.options
        if self.state is State.LOADING:
            wait_s = options.load_timeout_s
        else:
            wait_s = options.room_wait_s if self.waiting else 0.0
        size_bytes = 0
        if self._weighed:  # it may have grown beyond what there is, but it was loaded with less
            size_bytes = min(self._size_bytes, room.most_bytes(self))
        elif options.memory_bytes:
            size_bytes = guessed_bytes(self.folder)
        await room.admit(self, size_bytes, wait_s)

    async def _settled(self) -> bool:
        """Whether there is room for what its processes have turned out to take. Raises `Refused` if there cannot be.

        If it was known before, a little more than that is no reason to wait for others and load it again.
        """
        if not self._site.options.memory_bytes:
            return True
        known, self._weighed = self._weighed, True
        return await self._site.room.settle(self, await self.measured(), anyway=known)

    async def measured(self) -> int:
        """What its processes take now."""
        pids = tuple(self.pids)
        size_bytes = await asyncio.to_thread(used_bytes, pids)
        if size_bytes and pids == tuple(self.pids):
            self._size_bytes = size_bytes
        return self._size_bytes

    @property
    def folder(self) -> Path:
        """That of the version."""
        return self.described.versions[self.number]

    async def _keep(self, process: ModelProcess) -> None:
        """Own the processes until they end."""
        try:
            await process.run()
        except GaveUp as gave_up:
            self._lost(str(gave_up))
        except Exception as error:  # supervisor: a mistake in keeping one model must not cost the others
            self._log.error("model process failed", trace=traceback.format_exc())
            self._lost(f"{type(error).__name__}: {error}")
        finally:
            self._gone.set()

    def _lost(self, why: str) -> None:
        """Its processes are gone for good."""
        if self.state is State.READY:
            self._move(Event.FAILED, f"{KIND_TEXT[Kind.INTERNAL]}: {why}")
            text = f"model '{self.name}' version {self.text} is not available: {why}"
            self._close(Refused(Kind.UNAVAILABLE, text))

    async def _end(self, refused: Refused | None) -> None:
        """End what runs and what waits."""
        process = self._process
        if refused is not None:
            self._close(refused)
        if process is not None:
            process.stop()
            await self._gone.wait()
            self._process = None
        if self._seats is not None:
            self._seats.close()
            self._seats = None
        self._site.room.remove(self)

    def _close(self, refused: Refused) -> None:
        if self._runner is not None:
            self._runner.close(refused)

    def _changed(self) -> None:
        if self._runner is not None:
            self._runner.wake()
        self._look_still()  # what a lost process never came to waits again

    def _ended(self, call: Call) -> None:
        self.inflight -= 1
        self.held_bytes -= call.size_bytes
        if not self.inflight:
            if not self._still:
                self._site.room.leave(self)
            self._quiet.set()
        self._look_still()

    def _keep_answer(self, answers: Answers, call: Call, response: InferResponse) -> None:
        if response.error is None:
            answers.keep(call, response)

    def _move(self, event: Event, reason: str = "") -> None:
        self.state = after(self.state, event)
        self.reason = reason
        self._site.moves += 1
        self._log.info("model " + event, state=self.state, reason=reason)


def not_ready(name: str, version: str) -> str:
    """What Triton says of a version that is there but does not serve."""
    return f"'{name}' version {version} is not at ready state"
