"""The scheduler of models without sequences: requests wait in the dynamic batcher until an instance is free.

There is no task and no timer for a request: what happens is woken by requests, by batches that end, and by one alarm
for each model version, which is only set while something has to happen at a time.
"""

import asyncio
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Final

from forebay.core.serving.batcher import TIMEOUT_EXPIRED, Batch, Batcher, Pace, WaitUntil
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.alarm import Alarm
from forebay.modelserver.models.running.call import Call, Phase
from forebay.modelserver.models.running.counting import Reason
from forebay.modelserver.models.running.execution import Batch as Running
from forebay.modelserver.models.running.execution import Executor
from forebay.modelserver.models.running.inputs import prefix
from forebay.modelserver.process.values import Done, Work

DEADLINES: Final = "forebay.deadlines"
"""A parameter of a model: `true` makes deadlines of timeouts."""
TOO_LATE: Final = "its deadline cannot be met"


class Queued:
    """Requests of one model version on its instances."""

    def __init__(self, config: ModelConfig, executor: Executor, instances: int) -> None:
        self._batcher: Batcher[Call] = Batcher(config.batching, config.max_batch, instances=instances)
        self._executor = executor
        self._pace = Pace()
        self._timed = False
        """Whether there have been deadlines. Until then nobody has to know how long batches take."""
        self._latest_ns = 0
        """How long the last batch took."""
        self._by_timeout = config.says(DEADLINES)
        """Whether a request's timeout is also when its answer has to be there."""
        self._together = config.batching is not None and config.max_batch > 1
        self._model = config.name
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._pump)
        self._woken = False
        self._held = False
        levels = config.batching is not None and config.batching.levels > 0
        self._full = inf if levels else config.max_batch if self._together else 1
        """So many waiting requests make a batch that will not become better by waiting."""
        executor.on_free = self._on_free
        executor.on_again = self._again

    @property
    def waiting(self) -> int:
        """Requests that wait for an instance."""
        return len(self._batcher)

    def set_instances(self, instances: int) -> None:
        """There are that many now."""
        self._batcher.instances = instances
        self.wake()

    def submit(self, call: Call) -> None:
        """Queue a request. Raises `Refused` if there is no place for it."""
        offer(self._batcher, call, self._deadline(call) if call.request.deadline or self._by_timeout else None)
        if self._together:
            self.wake()  # those that are read from other connections just now may join
        else:
            self._pump()

    def cancel(self, call: Call) -> None:
        """Nobody waits for that request."""
        if call.phase is Phase.RUNNING:
            self._executor.flag(call)
        elif self._batcher.cancel(call):
            self._executor.fail(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)
            self.wake()

    def wake(self) -> None:
        """Something has changed: look soon whether a batch can start."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def hold(self) -> None:
        """Start no more batches; requests wait until `go_on`, or for as long as they may."""
        self._held = True

    def go_on(self) -> None:
        """Start batches again."""
        self._held = False
        self.wake()

    def emptied(self) -> list[Call]:
        """All that wait, which are the caller's from now on; this is at its end."""
        batcher = self._batcher
        calls: list[Call] = []
        while len(batcher) and type(batch := batcher.poll(inf)) is Batch:
            calls += batch.items
        calls += batcher.expired(inf)
        self._alarm.close()
        return calls

    def close(self, refused: Refused) -> None:
        """Nothing runs any more: all that wait end with this error."""
        for call in self.emptied():
            self._executor.fail(call, refused, Reason.OTHER)

    def _pump(self) -> None:
        """Start what can start, end what has waited for too long, and set the alarm for what comes next."""
        self._woken = False
        now = monotonic()
        at: float | None = None
        for instance in self._executor.idle() if not self._held else ():
            verdict = self._batcher.poll(now)
            if type(verdict) is not Batch:
                self._executor.spare(instance)
                at = verdict.at if type(verdict) is WaitUntil else None
                break
            self._start(instance, verdict)
        if len(self._batcher) >= self._full and not self._held:
            self._go_ahead(now)
        for call in self._batcher.expired(now):
            self._executor.fail(call, Refused(Kind.UNAVAILABLE, self._too_late(call, now)), Reason.REJECTED)
        expiry = self._batcher.next_expiry
        if expiry is not None and (at is None or expiry < at):
            at = expiry
        if at is not None:
            self._alarm.set(at)

    def _go_ahead(self, now: float) -> None:
        """Give instances that are busy what they run next, as far as waiting would not make larger batches of it."""
        for instance in self._executor.ahead():
            verdict = self._batcher.poll(now) if len(self._batcher) >= self._full else None
            if type(verdict) is not Batch:
                return
            self._start(instance, verdict)

    def _again(self, calls: Sequence[Call | None]) -> None:
        """These have lost their process before it came to them."""
        for call in calls:
            if call is None or call.phase is Phase.ENDED:
                continue
            call.phase = Phase.WAITING
            if call.cancelled:  # while it was to run next, as a call of the process that is lost
                self._executor.fail(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)
                continue
            try:
                self.submit(call)
            except Refused as refused:
                self._executor.fail(call, refused, Reason.OTHER)

    def _start(self, instance: int, batch: "Batch[Call]") -> None:
        works = [work_of(call) for call in batch.items]
        self._executor.run(instance, batch.items, works, batch.rows, None)

    def _deadline(self, call: Call) -> float | None:
        """When its answer is worth nothing any more; None: it keeps its worth."""
        if not self._timed:
            self._timed = True
            self._learn(self._latest_ns)
        return deadline_of(call, self._by_timeout)

    def _learn(self, took_ns: int) -> None:
        if took_ns:
            self._pace.note(took_ns / 1e9)
            self._batcher.run_s = self._pace.run_s

    def _too_late(self, call: Call, now: float) -> str:
        """Why a request leaves the queue without having run."""
        deadline = self._deadline(call)
        run_s = self._pace.run_s
        if deadline is None or deadline > now + run_s:
            return TIMEOUT_EXPIRED
        self._pace.doubt()
        self._batcher.run_s = self._pace.run_s
        left_ms = max(0.0, deadline - now) * 1e3
        return (
            f"{prefix(call.request.id)}{TOO_LATE}: {left_ms:.0f} ms are left, and a batch takes {run_s * 1e3:.0f} ms"
        )

    def _on_free(self, batch: Running, done: Done) -> None:
        if self._timed:
            self._learn(done.compute_infer_ns)
        else:
            self._latest_ns = done.compute_infer_ns
        if len(self._batcher):
            self._pump()


def offer(queue: Batcher[Call], call: Call, deadline: float | None) -> None:
    """Put a request into a queue. Raises `Refused`, in its name, if there is no place for it.

    Its timeout runs since it began to wait, in whatever queue that was.
    """
    request, checked = call.request, call.checked
    try:
        queue.offer(
            call,
            rows=checked.rows,
            shape=checked.shape,
            level=request.priority,
            timeout_s=request.timeout_us / 1e6,
            now=call.queued_ns / 1e9,
            deadline=deadline,
        )
    except Refused as refused:
        raise Refused(refused.kind, prefix(request.id) + refused.text) from None


def deadline_of(call: Call, by_timeout: bool) -> float | None:
    """When an answer is worth nothing any more; None: it keeps its worth."""
    request = call.request
    if by_timeout and request.timeout_us:
        at = (call.started_ns + request.timeout_us * 1000) / 1e9
        return min(at, request.deadline) if request.deadline else at
    return request.deadline or None


def work_of(call: Call) -> Work:
    """What the process gets of a request."""
    request = call.request
    return Work(
        request.id,
        call.checked.inputs,
        call.checked.outputs,
        request.parameters,
        correlation_id=request.sequence_id,
        start=request.sequence_start,
        end=request.sequence_end,
        timeout_us=request.timeout_us,
        priority=request.priority,
    )
