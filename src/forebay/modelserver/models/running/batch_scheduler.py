"""The scheduler of models without sequences: requests wait in the dynamic batcher for a free instance.

There is no task or timer per request: scheduling is driven by arriving requests, finished batches, and one alarm per
model version, which is set only while something is due at a later time.
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
from forebay.modelserver.turns import waited_s

DEADLINES: Final = "forebay.deadlines"
"""Model parameter: `true` treats request timeouts as deadlines."""
TOO_LATE: Final = "its deadline cannot be met"


class BatchScheduler:
    """Schedules the requests of one model version on its instances."""

    def __init__(self, config: ModelConfig, executor: Executor, instances: int) -> None:
        self._batcher: Batcher[Call] = Batcher(config.batching, config.max_batch, instances=instances)
        self._executor = executor
        self._pace = Pace()
        self._timed = False
        """Whether a request has had a deadline. Until then the duration of batches is not tracked."""
        self._latest_ns = 0
        """Duration of the last batch."""
        self._by_timeout = config.says(DEADLINES)
        """Whether a request's timeout is also the deadline of its response."""
        self._batches = config.batching is not None and config.max_batch > 1
        self._model = config.name
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._pump)
        self._delays = config.batching is not None and config.batching.delay_s > 0
        self._looked = False
        """Whether `_waited_s` is that of this turn of the loop."""
        self._waited_s = 0.0
        """How long requests that are read now may have waited to be read. Their delay counts from then: on a core
        that server and model share, it would else begin when a batch has ended, and leave the core idle."""
        self._woken = False
        self._held = False
        has_policy = self._by_timeout or (config.batching is not None and config.batching.has_policy)
        self._full = inf if has_policy else config.max_batch if self._batches else 1
        """Number of queued requests from which on they gain nothing by waiting in the queue."""
        self._at_once = not (self._batches or has_policy)
        """Whether a request may start within `submit`: nothing can join it, or end it at once."""
        executor.on_free = self._on_free
        executor.on_not_started = self._requeue

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._batcher)

    def set_instances(self, instances: int) -> None:
        """Update the number of instances."""
        self._batcher.instances = instances
        self.wake()

    def submit(self, call: Call) -> None:
        """Queue a request. Raises `Refused` if the queue is full."""
        deadline = self._deadline(call) if call.request.deadline or self._by_timeout else None
        if self._delays and not self._looked:
            self._look()
        offer(self._batcher, call, deadline, self._waited_s)
        if self._at_once and not call.request.deadline:
            self._pump()
        else:
            self.wake()  # requests being read just now may join the batch; one that is too late is answered later

    def cancel(self, call: Call) -> None:
        """Cancel a request."""
        if call.phase is Phase.RUNNING:
            self._executor.cancel(call)
        elif self._batcher.cancel(call):
            self._executor.fail(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)
            self.wake()

    def wake(self) -> None:
        """Check soon whether a batch can start."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def hold(self) -> None:
        """Start no more batches until `resume`; requests stay queued until they time out."""
        self._held = True

    def resume(self) -> None:
        """Start batches again."""
        self._held = False
        self.wake()

    def take_all(self) -> list[Call]:
        """Remove and return all queued requests; the scheduler must not be used after this."""
        batcher = self._batcher
        calls: list[Call] = []
        while len(batcher) and type(batch := batcher.poll(inf)) is Batch:
            calls += batch.items
        calls += batcher.expired(inf)
        self._alarm.close()
        return calls

    def close(self, refused: Refused) -> None:
        """Fail all queued requests with this error; no batch runs any more."""
        for call in self.take_all():
            self._executor.fail(call, refused, Reason.OTHER)

    def _pump(self) -> None:
        """Start what can start, expire what has timed out, and set the alarm for the next time-based event."""
        self._woken = False
        now = monotonic()
        at: float | None = None
        for instance in self._executor.idle() if not self._held else ():
            verdict = self._batcher.poll(now)
            if type(verdict) is not Batch:
                at = verdict.at if type(verdict) is WaitUntil else None
                break
            self._start(instance, verdict)
        self._executor.spare_all()
        if len(self._batcher) >= self._full and not self._held:
            self._run_ahead(now)
        for call in self._batcher.expired(now):
            self._executor.fail(call, self._too_late(call, now), Reason.REJECTED)
        expiry = self._batcher.next_expiry
        if expiry is not None and (at is None or expiry < at):
            at = expiry
        if at is not None:
            self._alarm.set(at)

    def _run_ahead(self, now: float) -> None:
        """Give a busy instance its next batch, whose requests gain nothing by waiting."""
        if self._executor.ahead():
            verdict = self._batcher.poll(now)
            if type(verdict) is Batch:
                self._start(0, verdict)

    def _requeue(self, calls: Sequence[Call | None]) -> None:
        """Requeue requests that a lost process had not started."""
        for call in calls:
            if call is None or call.phase is Phase.ENDED:
                continue
            call.phase = Phase.WAITING
            if call.cancelled:  # cancelled while queued in the process that was lost
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
        """Deadline of the response (CLOCK_MONOTONIC, seconds), or None."""
        if not self._timed:
            self._timed = True
            self._learn(self._latest_ns)
        return deadline_of(call, self._by_timeout)

    def _learn(self, took_ns: int) -> None:
        """Tell the batcher how long a batch takes; 0: none has run."""
        if took_ns:
            self._pace.note(took_ns / 1e9)
            self._batcher.run_s = self._pace.run_s

    def _too_late(self, call: Call, now: float) -> Refused:
        """The error of a request that leaves the queue without having run: its timeout or its deadline."""
        deadline = self._deadline(call)
        run_s = self._pace.run_s
        if deadline is None or deadline > now + run_s:
            return Refused(Kind.UNAVAILABLE, TIMEOUT_EXPIRED)
        self._pace.doubt()
        self._batcher.run_s = self._pace.run_s
        left_ms = max(0.0, deadline - now) * 1e3
        text = f"{TOO_LATE}: {left_ms:.0f} ms are left, and a batch takes {run_s * 1e3:.0f} ms"
        return Refused(Kind.DEADLINE_EXCEEDED, prefix(call.request.id) + text)

    def _look(self) -> None:
        """Learn how long this turn of the loop has waited for its core."""
        self._looked, self._waited_s = True, waited_s()
        self._loop.call_soon(self._turned)

    def _turned(self) -> None:
        self._looked = False

    def _on_free(self, batch: Running, done: Done) -> None:
        if self._delays and not self._looked:
            self._look()
        if self._timed:
            self._learn(done.compute_infer_ns)
        else:
            self._latest_ns = done.compute_infer_ns
        if len(self._batcher):
            self._pump()


def offer(queue: Batcher[Call], call: Call, deadline: float | None, waited_s: float = 0.0) -> None:
    """Put a request into a queue. Raises `Refused`, with the request's prefix, if the queue is full.

    Its timeout counts from when it was first queued, even if that was in another queue.
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
            waited_s=waited_s,
        )
    except Refused as refused:
        raise Refused(refused.kind, prefix(request.id) + refused.text) from None


def deadline_of(call: Call, by_timeout: bool) -> float | None:
    """Deadline of the response (CLOCK_MONOTONIC, seconds), or None."""
    request = call.request
    if by_timeout and request.timeout_us:
        at = (call.started_ns + request.timeout_us * 1000) / 1e9
        return min(at, request.deadline) if request.deadline else at
    return request.deadline or None


def work_of(call: Call) -> Work:
    """The request as sent to the process."""
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
