"""Requests for a model that is loaded again because of them."""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

from forebay.core.serving.batcher import TIMEOUT_EXPIRED, Batcher
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.alarm import Alarm
from forebay.modelserver.models.running.call import Call, Runner
from forebay.modelserver.models.running.counting import Counts, Reason
from forebay.modelserver.models.running.inputs import prefix
from forebay.modelserver.models.running.queued import DEADLINES, deadline_of, offer

TOO_LATE: Final = "its deadline has passed before its model was loaded again"
BACK_IN_S: Final = 1
"""When it makes sense to come back: the model may be there then."""


class Parking:
    """Stands for the scheduler of a version that sleeps.

    `awaken` has it loaded; `forsaken` hears that nobody waits for that any more. Timeouts and deadlines hold here.
    """

    def __init__(
        self, config: ModelConfig, counts: Counts, awaken: Callable[[], None], forsaken: Callable[[], None]
    ) -> None:
        self._config = config
        self._by_timeout = config.says(DEADLINES)
        self._counts = counts
        self._awaken = awaken
        self._forsaken = forsaken
        self._waking = False
        self._calls: dict[Call, None] = {}
        """In the order in which they have come."""
        self._queue = self._empty()
        """The same, for their times: no batch is taken from it."""
        self._alarm: Alarm | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for the model."""
        return len(self._calls)

    def take(self, calls: Iterable[Call]) -> None:
        """Keep what has waited for the model before it went to sleep, and wake it."""
        for call in calls:
            call.runner = self
            try:
                self.submit(call)
            except Refused as refused:
                self._counts.refuse(call, refused, Reason.OTHER)

    def submit(self, call: Call) -> None:
        """Keep a request, and wake the model. Raises `Refused` if there is no place for it."""
        offer(self._queue, call, deadline_of(call, self._by_timeout))
        self._calls[call] = None
        self._set_alarm()
        self.awaken()

    def awaken(self) -> None:
        """Wake the model, unless that is under way."""
        if not self._waking:
            self._waking = True
            self._awaken()

    def cancel(self, call: Call) -> None:
        """Nobody waits for that request."""
        if call in self._calls:
            self._queue.cancel(call)
            self._refuse(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)

    def set_instances(self, instances: int) -> None:
        """There are none."""

    def wake(self) -> None:
        """Nothing can start here."""

    def rest(self) -> None:
        """The model was not loaded as nobody waited for it; who has come meanwhile wakes it."""
        self._waking = False
        if self._calls:
            self.awaken()

    def close(self, refused: Refused) -> None:
        """All that wait end with this error; the next one wakes the model again."""
        self._waking = False
        for call in self._emptied():
            self._counts.refuse(call, refused, Reason.OTHER)

    def move(self, runner: Runner) -> None:
        """The model is there: its scheduler takes over."""
        for call in self._emptied():
            call.runner = runner
            try:
                runner.submit(call)
            except Refused as refused:
                self._counts.refuse(call, refused, Reason.OTHER)

    def _ring(self) -> None:
        now = monotonic()
        for call in self._queue.expired(now):
            deadline = deadline_of(call, self._by_timeout)
            late = deadline is not None and deadline <= now
            text = prefix(call.request.id) + TOO_LATE if late else TIMEOUT_EXPIRED
            self._refuse(call, Refused(Kind.UNAVAILABLE, text, BACK_IN_S), Reason.REJECTED)
        self._set_alarm()

    def _refuse(self, call: Call, refused: Refused, reason: Reason) -> None:
        del self._calls[call]
        self._counts.refuse(call, refused, reason)
        if not self._calls:
            self._forsaken()

    def _set_alarm(self) -> None:
        at = self._queue.next_expiry
        if at is not None:
            if self._alarm is None:
                self._alarm = Alarm(self._ring)
            self._alarm.set(at)

    def _emptied(self) -> dict[Call, None]:
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        calls, self._calls, self._queue = self._calls, {}, self._empty()
        return calls

    def _empty(self) -> Batcher[Call]:
        return Batcher(self._config.batching, self._config.max_batch)
