"""Queue for requests to a sleeping model, which they wake."""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

from forebay.core.serving.batcher import TIMEOUT_EXPIRED, Batcher
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.alarm import Alarm
from forebay.modelserver.models.running.batch_scheduler import DEADLINES, deadline_of, offer
from forebay.modelserver.models.running.call import Call, Runner
from forebay.modelserver.models.running.counting import Counts, Reason
from forebay.modelserver.models.running.inputs import prefix

TOO_LATE: Final = "its deadline passed before its model was loaded again"
BACK_IN_S: Final = 1
"""Retry-after hint, in seconds: the model may be loaded by then."""
FAILURES_MAX: Final = 5
"""Loads that may fail in a row, as of a process that keeps ending: the machine may have lacked memory for a while."""


class WakeQueue:
    """Stands in for the scheduler of a sleeping version. Timeouts and deadlines apply here, too.

    `awaken` starts a load; `on_abandoned` is called when no request waits for it any more.
    """

    def __init__(
        self, config: ModelConfig, counts: Counts, awaken: Callable[[], None], on_abandoned: Callable[[], None]
    ) -> None:
        self._config = config
        self._by_timeout = config.says(DEADLINES)
        self._counts = counts
        self._awaken = awaken
        self._on_abandoned = on_abandoned
        self._waking = False
        self._failures = 0
        self._calls: dict[Call, None] = {}
        """In order of arrival."""
        self._queue = self._empty()
        """The same requests, only for their timeouts: no batch is taken from it."""
        self._alarm: Alarm | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for the model."""
        return len(self._calls)

    def take(self, calls: Iterable[Call]) -> None:
        """Take over requests that were queued when the model went to sleep, and wake it."""
        for call in calls:
            call.runner = self
            try:
                self.submit(call)
            except Refused as refused:
                self._counts.refuse(call, refused, Reason.OTHER)

    def submit(self, call: Call) -> None:
        """Queue a request and wake the model. Raises `Refused` if the queue is full."""
        offer(self._queue, call, deadline_of(call, self._by_timeout))
        self._calls[call] = None
        self._set_alarm()
        self.awaken()

    def awaken(self) -> None:
        """Wake the model unless that is in progress."""
        if not self._waking:
            self._waking = True
            self._awaken()

    def cancel(self, call: Call) -> None:
        """Cancel a request."""
        if call in self._calls:
            self._queue.cancel(call)
            self._refuse(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)

    def set_instances(self, instances: int) -> None:
        """A sleeping model has no instances."""

    def wake(self) -> None:
        """Nothing to do: no batches start here."""

    def on_load_cancelled(self) -> None:
        """The load was cancelled because no request waited; start another if some have come since."""
        self._waking = False
        if self._calls:
            self.awaken()

    def on_load_failed(self) -> bool:
        """The load failed; close the queue. Returns whether it has failed too often to be tried again."""
        self._failures += 1
        return self._failures >= FAILURES_MAX

    def close(self, refused: Refused) -> None:
        """Fail all waiting requests with this error; the next request wakes the model again."""
        self._waking = False
        for call in self._take_all():
            self._counts.refuse(call, refused, Reason.OTHER)

    def hand_over(self, runner: Runner) -> None:
        """The model is loaded: hand all requests to its scheduler."""
        for call in self._take_all():
            call.runner = runner
            try:
                runner.submit(call)
            except Refused as refused:
                self._counts.refuse(call, refused, Reason.OTHER)

    def _expire(self) -> None:
        """Fail the requests whose timeout or deadline has passed."""
        now = monotonic()
        for call in self._queue.expired(now):
            if call not in self._calls:
                continue  # cancelled as another one ended here, like steps of the same ensemble
            deadline = deadline_of(call, self._by_timeout)
            late = deadline is not None and deadline <= now
            kind = Kind.DEADLINE_EXCEEDED if late else Kind.UNAVAILABLE
            text = prefix(call.request.id) + TOO_LATE if late else TIMEOUT_EXPIRED
            self._refuse(call, Refused(kind, text, BACK_IN_S), Reason.REJECTED)
        self._set_alarm()

    def _refuse(self, call: Call, refused: Refused, reason: Reason) -> None:
        del self._calls[call]
        self._counts.refuse(call, refused, reason)
        if not self._calls:
            self._on_abandoned()

    def _set_alarm(self) -> None:
        at = self._queue.next_expiry
        if at is not None:
            if self._alarm is None:
                self._alarm = Alarm(self._expire)
            self._alarm.set(at)

    def _take_all(self) -> dict[Call, None]:
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        calls, self._calls, self._queue = self._calls, {}, self._empty()
        return calls

    def _empty(self) -> Batcher[Call]:
        return Batcher(self._config.batching, self._config.max_batch)
